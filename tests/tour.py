"""A test for each law and each room, in one process. The exit status is 1 if they take more than 30 s of CPU time."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

MOST_S = 30.0  # it takes about 10 s of a quiet machine; CPU time too is longer where others compute


def main() -> int:
    # Only these files: to collect the others takes longer than all tests of the tour.
    files = sorted(str(file) for file in Path("tests").rglob("test_*.py") if "mark.tour(" in file.read_text("utf-8"))
    status = subprocess.run([sys.executable, "-m", "pytest", "--quiet", "-m", "tour", *files], check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{cpu_s:.1f} s of CPU time, of {MOST_S:g} s")
    return status or int(cpu_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
