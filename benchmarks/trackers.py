"""Step time with trackers that misbehave over step time without any, and how often people are warned.

One loop trains a small model. Its steps take turns: one without trackers, then one with a tracker that hangs when it is opened, one with
a tracker that raises at step 7, one with a tracker whose disk is full, one with TensorBoard if it is installed, each round in another
order. What slows the machine down thus slows all down.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import Results, arguments, spread
from torch import nn

from heterodyne.runtime.records.trackers.trackers import Trackers

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
ALONE, WORKS = "no tracker", "TensorBoard"
BLOCKS = 10  # the ratio of a block of rounds is one measurement


def main() -> int:
    options = arguments(__doc__)
    results = Results("trackers")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        said: dict[str, list[str]] = {way: [] for way in (*WAYS, WORKS)}
        trackers = opened(Path(folder), said)
        seconds = taken(trackers, rounds=600 if options.quick else 4000)
        for way, own in trackers.items():
            own.close()
            warnings = sum(line.startswith("warning:") for line in said[way])
            ratios = in_blocks(seconds[way], seconds[ALONE])
            results.row(f"a tracker that {way}" if way in WAYS else way, step_ratio=spread(ratios), warnings=warnings)
            if way in WAYS:
                results.bar(f"step time with a tracker that {way}", median(ratios), "<= 1.01")
                results.bar(f"warnings about a tracker that {way}", warnings, "<= 1")
        results.row(ALONE, step_ms=spread([1000 * s for s in seconds[ALONE]]))
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


def taken(trackers: Mapping[str, Trackers], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by way; the first tenth warms up, while the processes of the trackers start."""
    step = training_step()
    seconds: dict[str, list[float]] = {way: [] for way in (ALONE, *trackers)}
    order = list(seconds)
    drawn = random.Random(0)
    warm_up = rounds // 10
    for number in range(1, warm_up + rounds + 1):
        drawn.shuffle(order)
        for way in order:
            started = time.perf_counter()
            loss = step()
            if way != ALONE:
                trackers[way].write(
                    number, {f"train/{name}": loss for name in ("loss", "lr", "grad_norm", "step_s", "rate")}
                )
            if number > warm_up:
                seconds[way].append(time.perf_counter() - started)
    return seconds


def training_step() -> Callable[[], float]:
    """About 15 ms on one core: a step of a real model takes longer, and a tracker less of it."""
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


def in_blocks(seconds: list[float], alone: list[float]) -> list[float]:
    """Median over median of each block of rounds."""
    size = len(alone) // BLOCKS
    return [
        median(seconds[first : first + size]) / median(alone[first : first + size])
        for first in range(0, size * BLOCKS, size)
    ]


if __name__ == "__main__":
    sys.exit(main())
