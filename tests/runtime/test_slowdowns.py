"""A rank or a link that becomes slow is named within ten steps; uneven lengths alone lead to no word."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from heterodyne.runtime.liveness.slowdowns import Slowdowns

RANKS = 3


class Group:
    """Threads that add up what each has, as ranks do."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._given: dict[int, Tensor] = {}

    def all_reduce(self, rank: int, rows: Tensor) -> None:
        self._given[rank] = rows.clone()
        self._barrier.wait()
        rows.copy_(torch.stack(list(self._given.values())).sum(0))
        self._barrier.wait()


def run(
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    elements: Callable[[int], list[int]],
    seconds: Callable[[int, int, int], float],
    message_s: Callable[[int, int], float] = lambda rank, step: 0.001,
) -> dict[int, str]:
    """What was said after which step, the same on all ranks, where passes and messages take what these say."""
    group = Group()
    now = [0] * RANKS
    monkeypatch.setattr(
        Slowdowns, "_message_s", lambda own: message_s(own._communicator.rank, now[own._communicator.rank])
    )

    def life(rank: int) -> dict[int, str]:
        def all_reduce(rows: Tensor) -> Any:
            group.all_reduce(rank, rows)
            return SimpleNamespace(wait=lambda: None)

        computed_s: list[float] = []
        recorder: Any = SimpleNamespace(on=True, computed_s=lambda _: computed_s[-2])
        communicator: Any = SimpleNamespace(rank=rank, world_size=RANKS, control=SimpleNamespace(all_reduce=all_reduce))
        own = Slowdowns(communicator, recorder, [f"host-{r}/cpu:0" for r in range(RANKS)])
        told = {}
        for step in range(steps):
            now[rank] = step
            look = torch.tensor([float(own.suspects)])
            all_reduce(look)
            read = elements(step)
            passes = [seconds(r, step, e) for r, e in enumerate(read)]
            computed_s.append(passes[rank])
            step_s = max(passes) + sum(message_s(r, step) for r in range(RANKS))  # all wait for the slowest
            found = own.note(step, step_s, read[rank], look=bool(look > 0))
            if found is not None:
                told[step] = found
        return told

    with ThreadPoolExecutor(RANKS) as threads:
        told = list(threads.map(life, range(RANKS)))
    assert told == told[:1] * RANKS
    return told[0]


def test_a_busy_machine_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run(monkeypatch, 40, lambda _: [1000] * RANKS, lambda _, step, __: 0.2 if step >= 20 else 0.1)
    ((step, words),) = told.items()
    assert words.startswith("all ranks compute 2.0 times slower than in the first steps")
    assert 20 <= step < 30


def noise(*key: int, spread: float) -> float:
    return math.exp(random.Random(hash(key)).gauss(0, spread))


@pytest.mark.parametrize("seed", range(3))
def test_uneven_lengths_are_no_reason_for_a_word(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Log-normal as texts are, longer and longer for a while; passes take more than in proportion, as attention does, and vary."""
    told = run(
        monkeypatch,
        2000,
        lambda step: [
            int(1000 * (1 + (step % 700) / 350) * noise(seed, step, rank, spread=0.5)) for rank in range(RANKS)
        ],
        lambda rank, step, read: (read * 1e-5 + read**2 * 3e-9) * noise(seed, rank, step, 1, spread=0.1),
    )
    assert not told


@pytest.mark.parametrize("at", [12, 300])
def test_a_rank_at_a_third_is_named_within_ten_steps_and_when_it_is_well_again(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    def seconds(rank: int, step: int, _: int) -> float:
        slow = 3.0 if rank == 1 and at <= step < at + 30 else 1.0
        return 0.1 * slow * (1.0, 1.0, 0.7)[rank] * noise(rank, step, spread=0.03)

    told = run(monkeypatch, at + 60, lambda _: [1000] * RANKS, seconds)
    (first, words), (later, well) = told.items()
    assert at <= first < at + 10
    assert words.startswith("rank 1 (host-1/cpu:0) computes ")
    assert 2.7 < float(words.split(" computes ")[1].split()[0]) < 3.3
    assert int(words.split(" since about step ")[1]) == pytest.approx(at + 1, abs=3)
    assert at + 30 <= later < at + 40
    assert well == ""


def test_a_link_at_a_tenth_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = run(
        monkeypatch,
        40,
        lambda _: [1000] * RANKS,
        lambda *_: 0.1,
        lambda rank, step: 0.1 if rank == 2 and step >= 20 else 0.01,
    )
    ((step, words),) = told.items()
    assert words.startswith("messages from rank 2 (host-2/cpu:0) to rank 0 (host-0/cpu:0) take 10.0 times longer")
    assert 20 <= step < 30
