"""A share is timed as a whole, after a warm-up, until it lasted long enough; ranks without a share take part in the meetings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from heterodyne.errors import MeasureError
from heterodyne.measure.trial import try_share
from measure.fake_device import FakeClock, FakeProgram, bench_of


@dataclass
class Whole:
    """A model of known cost in the place of a whole one; remembers what it was asked for."""

    clock: FakeClock
    per_sample_s: float
    built: int = 0
    asked: list[int] = field(default_factory=list)

    def instantiate(self, batch: int, device: torch.device) -> tuple[nn.Module, Sequence[torch.Tensor]]:
        self.built += 1
        owner = self

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                block, _ = FakeProgram(owner.clock, 0.0, owner.per_sample_s / 3).instantiate(len(x), x.device)
                return block(x * self.weight).sum()  # type: ignore[no-any-return]

        return Model(), self.inputs_of(batch, device)

    def inputs_of(self, batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        self.asked.append(batch)
        return (torch.ones(batch, 4, device=device),)


@pytest.mark.parametrize("sizes", [(4, 4, 2), (1,), (3, 8)])
def test_a_share_takes_the_sum_of_its_micro_batches(sizes: tuple[int, ...]) -> None:
    clock = FakeClock()
    whole: Any = Whole(clock, per_sample_s=0.5)
    assert try_share([(whole, sizes)], bench_of(clock)) == pytest.approx(0.5 * sum(sizes))
    assert whole.built == 1, "one copy of the weights serves all sizes"


def test_a_share_of_several_parts_takes_the_sum_of_them() -> None:
    clock = FakeClock()
    first: Any = Whole(clock, per_sample_s=0.5)
    second: Any = Whole(clock, per_sample_s=0.25)
    assert try_share([(first, (4, 4)), (second, (4, 2))], bench_of(clock)) == pytest.approx(0.5 * 8 + 0.25 * 6)


def test_the_weights_of_one_part_are_gone_when_the_next_is_built() -> None:
    """A plan that shares out weights leaves no room for all of them, with their gradients, beside each other."""
    clock = FakeClock()
    made: list[nn.Module] = []
    left: list[int] = []

    class Watched(Whole):
        def instantiate(self, batch: int, device: torch.device) -> tuple[nn.Module, Sequence[torch.Tensor]]:
            left.append(sum(len(list(module.parameters())) for module in made))
            module, inputs = super().instantiate(batch, device)
            made.append(module)
            return module, inputs

    parts: Any = [(Watched(clock, per_sample_s=0.5), (2,)) for _ in range(3)]
    try_share(parts, bench_of(clock))
    assert left == [0, 0, 0]
    assert not any(list(module.parameters()) for module in made), "nor is the last one kept"


def test_a_short_share_is_repeated_and_a_disturbance_outvoted() -> None:
    clock = FakeClock(noise=lambda run: 50.0 if run == 7 else 1.0)
    whole: Any = Whole(clock, per_sample_s=0.1)
    assert try_share([(whole, (2, 2))], bench_of(clock)) == pytest.approx(0.4)


def test_ranks_with_and_without_a_share_meet_equally_often() -> None:
    met: dict[bool, int] = {}
    for working in (True, False):
        clock, meetings = FakeClock(), []
        bench = bench_of(clock, gather=lambda word, meetings=meetings: [meetings.append(1), word][1:])
        seconds = try_share([(Whole(clock, 0.5), (2,))] if working else [], bench)
        met[working] = len(meetings)
        assert (seconds > 0) == working
    assert met[True] == met[False]


@pytest.mark.parametrize("built", [True, False])
def test_a_share_that_fails_on_one_rank_is_told_to_all_at_a_meeting(built: bool) -> None:
    """Whether there is no room for the model, or something breaks while it computes."""
    told: list[str | None] = []

    def gather(word: str | None) -> list[str | None]:
        told.append(word)
        return [None, word]

    class Breaks(Whole):
        def inputs_of(self, batch: int, device: torch.device) -> tuple[torch.Tensor, ...]:
            if not built:
                raise torch.OutOfMemoryError("no more")
            return super().inputs_of(batch, device)

    def noise(run: int) -> float:
        if run > 3:
            raise RuntimeError("no more")
        return 1.0

    clock = FakeClock(noise=noise)
    whole: Any = Breaks(clock, per_sample_s=0.1)
    with pytest.raises(MeasureError, match=r"^b: its share cannot be tried: \w+Error: no more$"):
        try_share([(whole, (2, 2))], bench_of(clock, gather=gather, devices=("a", "b")))
    assert [word is None for word in told] == ([True, False] if built else [False])
