"""Two sites that meet seldom, both on this machine: two launches of one job, each with its own plan, run directory and report.

Where they are apart, each starts its own line, with one secret: ``HETERODYNE_RUN_SECRET=... heterodyne train two_sites.yaml --site north``.
Arguments go to both.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = Path(__file__).with_name("two_sites.yaml")
SITES = ("north", "south")


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="two-sites-"))
    train = [sys.executable, "-m", "heterodyne", "train", str(JOB), *sys.argv[1:]]
    sites = []
    for site in SITES:
        with (folder / f"{site}.log").open("w") as log:
            command = [*train, "--site", site, "--run-dir", str(folder / site)]
            sites.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    statuses = [site.wait() for site in sites]
    if any(statuses):
        print("\n".join((folder / f"{site}.log").read_text() for site in SITES))
        return 1
    for site in SITES:
        lines = [json.loads(line) for line in (folder / site / "metrics.jsonl").read_text().splitlines()]
        met = [line for line in lines if "outer_step" in line]
        sent = sum(line["sent_bytes"] + line["received_bytes"] for line in met)
        loss = next(line["validation_loss"] for line in lines if "validation_loss" in line)
        print(
            f"{site}: validation loss {loss:.4f}, {len(met)} outer steps, {sent:,} bytes; {folder / site}/report.html"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
