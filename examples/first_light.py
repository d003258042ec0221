"""The main job: train a small GPT on unequal devices, from measuring them to a report.

If this machine has two unlike devices, the job runs on them. If not, the operating system makes four unequal workers of its
CPU cores (``heterodyne emulate``), of which the job knows nothing. Arguments go to ``heterodyne train``.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from heterodyne.measure.discover import local_accelerators

SPEEDS = (0.7, 0.35, 0.35, 0.2)
JOB = Path(__file__).with_name("first_light.yaml")


def main() -> int:
    train = [sys.executable, "-m", "heterodyne", "train", str(JOB), *sys.argv[1:]]
    kinds = {device.kind for device in local_accelerators(socket.gethostname())}
    if len(kinds) > 1:
        print(f"this machine has unlike accelerators: {', '.join(sorted(kinds))}")
    else:
        speeds = ",".join(map(str, SPEEDS))
        print(
            f"this machine has no two unlike accelerators: emulating {len(SPEEDS)} workers with {speeds} of a core each"
        )
        train = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", speeds, "--", *train]
    sys.stdout.flush()
    # This process becomes the command, so that Ctrl-C and the exit status are the command's own.
    os.execv(train[0], train)


if __name__ == "__main__":
    sys.exit(main())
