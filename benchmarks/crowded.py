"""A run beside 60 processes that never rest: nobody who is only starved of processor time is taken for dead.

Two workers train a small model, while the others take nearly all of the machine. The run must still be at work at the end, must have come
further in the last part of it, and must end in good order when it is asked to.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from results import ROOT, Results
from way_out import CLUSTER, JOB, command

BUSY, RUNS, RUN_S, QUICK_S = 60, 5, 110.0, 60.0
LEFT_IN_PEACE = 143
_LAST_PART = 0.5  # of a run, in which a step must have ended
_ENDED_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one run, of a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    parser.add_argument("--seconds", type=float, metavar="S", help=f"of each run; {RUN_S:.0f} by default")
    options = parser.parse_args()
    results = Results("crowded")
    seconds = options.seconds or (QUICK_S if options.quick else RUN_S)
    ended = 0
    for number in range(1 if options.quick else RUNS):
        with tempfile.TemporaryDirectory(prefix="crowded-") as name, busy(BUSY):
            row = trained(Path(name), seconds)
        results.row(f"run {number}", **row)
        ended += not row["went_on"] or row["status"] != LEFT_IN_PEACE
    results.bar("runs ended or at a stand", ended, "<= 0")
    return results.write(options.json)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that compute without a pause, while the block runs."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def trained(folder: Path, seconds: float) -> dict[str, int | bool]:
    """Train for so long beside what else runs, then ask it to end."""
    for file, text in {
        "cluster.yaml": CLUSTER,
        "job.yaml": JOB.replace("steps: 8,", "steps: 1000000,").replace("every: 2", "every: 100000"),
        "text.txt": "A text to train on. " * 2000,
    }.items():
        (folder / file).write_text(text)
    (folder / "way_out_model.py").write_bytes((ROOT / "benchmarks" / "way_out_model.py").read_bytes())
    run = folder / "run"
    environment = {**os.environ, "WAY_OUT": str(folder), "PYTHONPATH": f"{ROOT / 'src'}:{folder}"}
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command(run, "equal", ""), cwd=folder, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        until = time.monotonic() + 10 * seconds
        while not (first := steps_of(run)) and process.poll() is None and time.monotonic() < until:
            time.sleep(1.0)  # capturing and measuring take long here
        time.sleep(seconds * (1 - _LAST_PART))
        middle = steps_of(run)
        time.sleep(seconds * _LAST_PART)
        last, alone = steps_of(run), process.poll()
        if alone is None:
            process.send_signal(signal.SIGTERM)
        status = process.wait(_ENDED_S)
    if alone is not None or status != LEFT_IN_PEACE:
        print((folder / "said").read_text(errors="replace")[-3000:], flush=True)
    return {"went_on": alone is None and last > middle >= first > 0, "steps": last, "status": status}


def steps_of(run: Path) -> int:
    """Return how many steps a run has written down."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    return sum("loss" in json.loads(line) for line in lines if line.endswith("}"))


if __name__ == "__main__":
    sys.exit(main())
