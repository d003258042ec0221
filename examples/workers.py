"""What the examples share: each starts itself once more on unequal workers of this machine, and tells how its steps go."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torch import Tensor

import heterodyne as hd


def on_unequal_workers(*speeds: float) -> None:
    """Go on as one of the workers; as a plain process, become ``heterodyne emulate`` with one worker a speed."""
    if "RANK" in os.environ:
        return
    told = ",".join(map(str, speeds))
    print(f"emulating {len(speeds)} workers with {told} of a core each", flush=True)
    emulate = [sys.executable, "-m", "heterodyne", "emulate", "--speeds", told, "--", sys.executable, *sys.argv]
    os.execv(emulate[0], emulate)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(
    trainer: hd.Distributed,
    batch: Callable[[int], dict[str, Tensor]],
    steps: int,
    tell: Callable[[], str] | None = None,
) -> None:
    """The plan, then a line a step; ``tell`` adds to each what rank 0 has to say."""
    if trainer.rank == 0:
        print(trainer.explain())
    for step in range(steps):
        result = trainer.step(batch(step))
        if trainer.rank == 0:
            more = f"; {tell()}" if tell else ""
            print(f"step {step}: loss {result.loss:.4f}, {result.seconds:.3f} s{more}", flush=True)
