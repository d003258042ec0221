"""Random lives of a run: stopped and resumed again and again, each time on another number of ranks with other shares."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from heterodyne.runtime.slices import BatchSource

__all__ = ["live_through", "lives"]


def lives(seed: int, *, batch_size: int, steps: int) -> Iterator[tuple[range, list[tuple[int, int]]]]:
    """For each life the steps that it does, and the part ``(first, count)`` of the global batch that each rank takes."""
    dice = random.Random(seed)
    begin = 0
    while begin < steps:
        end = min(steps, begin + dice.randint(1, max(1, steps // 2)))
        ranks = dice.randint(1, 5)
        edges = [0, *sorted(dice.randint(0, batch_size) for _ in range(ranks - 1)), batch_size]
        yield range(begin, end), [(a, b - a) for a, b in pairwise(edges)]
        begin = end


def live_through(
    open_source: Callable[[], Any],
    read: Callable[[BatchSource, int, int], list[int]],
    seed: int,
    *,
    batch_size: int,
    steps: int,
) -> list[int]:
    """What the ranks together have consumed, in order of position. Each rank of each life opens the data anew.

    Some lives find what the one before has kept of the data (`state_dict`), as a checkpoint has it, some find only the step.
    """
    dice = random.Random(seed)
    consumed: list[int] = []
    kept = None
    for run, spans in lives(seed, batch_size=batch_size, steps=steps):
        sources = [open_source() for _ in spans]
        if kept is not None and dice.random() < 0.5:
            for source in sources:
                source.load_state_dict(kept)
        for step in run:
            for source, (first, count) in zip(sources, spans, strict=True):
                if count:
                    consumed += read(source.batch(step), first, count)
        kept = sources[dice.randrange(len(sources))].state_dict()
    return consumed
