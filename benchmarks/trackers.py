"""What trackers that misbehave add to a step, and how often people are warned.

One loop trains a small model. Its steps take turns: without trackers (twice, to see how far equal things differ on this machine), with a
tracker that hangs when it is opened, one that raises at step 7, one whose disk is full, and TensorBoard if it is installed; each round
in another order. Their processes are there all the time. The bar is on what the training waits for: a step with its `write` over the
same step without it. Step times of whole ways over that without trackers are shown too; on a busy machine they differ by more than 1%
where nothing is different.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import Results, arguments, spread
from torch import nn

from heterodyne.runtime.records.trackers.trackers import Trackers

WARM_UP = 50  # rounds

BAD = """
import errno, threading

class Tracker:
    def __init__(self, opening):
        self.kind = opening.options["kind"]
        if self.kind == "hangs":
            threading.Event().wait()

    def write(self, records):
        if self.kind == "raises" and records[-1].step >= 7:
            raise RuntimeError("no more")
        if self.kind == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        pass
"""
WAYS = {"hangs when it is opened": "hangs", "raises at step 7": "raises", "has no disk": "full"}
ALONE, AGAIN, WORKS = "no tracker", "no tracker, again", "TensorBoard"


def main() -> int:
    options = arguments(__doc__)
    results = Results("trackers")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        said: dict[str, list[str]] = {way: [] for way in (*WAYS, WORKS)}
        trackers = opened(Path(folder), said)
        steps, writes = taken(trackers, rounds=200 if options.quick else 2000)
        for way, own in trackers.items():
            own.close()
            warnings = sum(line.startswith("warning:") for line in said[way])
            added = median((step + write) / step for step, write in zip(steps[way], writes[way], strict=True))
            results.row(
                f"a tracker that {way}" if way in WAYS else way,
                step_and_write_over_step=added,
                step_ratio=ratio(steps[way], steps[ALONE]),
                longest_write_ms=1000 * max(writes[way]),
                warnings=warnings,
            )
            if way in WAYS:
                results.bar(f"step time with a tracker that {way}", added, "<= 1.01")
                results.bar(f"warnings about a tracker that {way}", warnings, "<= 1")
        results.row(AGAIN, step_ratio=ratio(steps[AGAIN], steps[ALONE]))
        results.row(ALONE, step_ms=spread([1000 * s for s in steps[ALONE]]))
    return results.write(options.json)


def opened(folder: Path, said: Mapping[str, list[str]]) -> dict[str, Trackers]:
    (folder / "bad.py").write_text(BAD, encoding="utf-8")
    wanted: dict[str, Any] = {
        way: {"custom": {"factory": f"{folder / 'bad.py'}:Tracker", "arguments": {"kind": kind}}}
        for way, kind in WAYS.items()
    }
    if importlib.util.find_spec("tensorboard") is not None:
        wanted[WORKS] = "tensorboard"
    return {way: Trackers([one], folder / way, flush_s=2.0, say=said[way].append) for way, one in wanted.items()}


def taken(trackers: Mapping[str, Trackers], *, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each step and of each write, by way; before that they warm up, while the processes of the trackers start."""
    step = training_step()
    order = [ALONE, AGAIN, *trackers]
    steps: dict[str, list[float]] = {way: [] for way in order}
    writes: dict[str, list[float]] = {way: [] for way in order}
    drawn = random.Random(0)
    for number in range(1, WARM_UP + rounds + 1):
        drawn.shuffle(order)
        for way in order:
            started = time.perf_counter()
            loss = step()
            stepped = time.perf_counter()
            if way in trackers:
                names = (
                    "loss",
                    "lr",
                    "grad_norm",
                    "step_s",
                    "samples_per_s",
                    "tokens_per_s",
                    "efficiency",
                    "memory_bytes",
                )
                trackers[way].write(number, {f"train/{name}": loss for name in names})
            written = time.perf_counter()
            if number > WARM_UP:
                steps[way].append(stepped - started)
                writes[way].append(written - stepped)
    return steps, writes


def training_step() -> Callable[[], float]:
    """About 15 ms on one core. A step of a real model takes longer, and a write the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 512)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ratio(seconds: Sequence[float], alone: Sequence[float]) -> dict[str, float]:
    return spread([own / other for own, other in zip(seconds, alone, strict=True)])


if __name__ == "__main__":
    sys.exit(main())
