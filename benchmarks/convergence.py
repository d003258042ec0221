"""The main job on four unequal emulated workers and on one device: the same losses, the two curves in one picture.

Both train the same model on the same batches in the same order, so the curves lie on each other but for the order of additions.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pictures import run_picture
from results import ROOT, Results, arguments

from heterodyne.report.run import load_run

SPEEDS = "0.7,0.35,0.35,0.2"
JOB = ROOT / "examples" / "first_light.yaml"
PICTURES = ROOT / "docs" / "pictures"


def main() -> int:
    options = arguments(__doc__)
    results = Results("convergence")
    steps = ["--set", "training.steps=20"] if options.quick else []
    with tempfile.TemporaryDirectory() as folder:
        unequal, alone = Path(folder) / "unequal", Path(folder) / "one-device"
        emulate = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", SPEEDS, "--"]
        unequal_s = train(unequal, steps, before=emulate)
        alone_s = train(alone, [*steps, "--set", "parallelism.micro_batch_sizes=[8]"], before=[])
        losses = {name: steps_of(path) for name, path in (("unequal", unequal), ("alone", alone))}
        gap = max(abs(a - b) / b for a, b in zip(losses["unequal"], losses["alone"], strict=True))
        last = {name: validation_of(path) for name, path in (("unequal", unequal), ("alone", alone))}
        for name, seconds in (("unequal", unequal_s), ("alone", alone_s)):
            results.row(
                "four unequal workers" if name == "unequal" else "one device",
                steps=len(losses[name]), final_loss=losses[name][-1], validation_loss=last[name], seconds=seconds,
            )  # fmt: skip
        if not options.quick:
            PICTURES.mkdir(parents=True, exist_ok=True)
            reference = load_run(alone).metrics
            run_picture(load_run(unequal), PICTURES / "first_light.png", reference=reference)
    results.row("largest relative gap between the losses of a step", gap=gap)
    results.bar("validation loss against one device, relative", abs(last["unequal"] / last["alone"] - 1), "<= 0.01")
    results.bar("improvement in validation loss over the uniform guess (5.545)", 5.545 - last["unequal"], ">= 2.0")
    return results.write(options.json)


def train(run: Path, options: list[str], *, before: list[str]) -> float:
    started = time.perf_counter()
    command = [*before, sys.executable, "-m", "heterodyne", "train", str(JOB), "--run-dir", str(run), *options]
    subprocess.run(command, check=True)
    return time.perf_counter() - started


def lines_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run) if "loss" in line]


def validation_of(run: Path) -> float:
    return [line["validation_loss"] for line in lines_of(run) if "validation_loss" in line][-1]


if __name__ == "__main__":
    sys.exit(main())
