"""What a collator makes of a sample does not depend on how the global batch is cut."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.data.dataset import DatasetSource
from heterodyne.runtime.data.stream import StreamSource

LENGTHS = [(7 * n) % 11 + 1 for n in range(40)]


class Texts:
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> list[int]:
        return [index + 1] * LENGTHS[index]


def padded(samples: list[list[int]]) -> dict[str, Tensor]:
    longest = max(map(len, samples))
    return {"ids": torch.tensor([[*sample, *[0] * (longest - len(sample))] for sample in samples])}


def masked(samples: list[list[int]]) -> dict[str, Tensor]:
    """As in masked language modelling: random numbers for the whole batch at once."""
    found = padded(samples)
    return {
        **found,
        "masked": torch.bernoulli(torch.full(found["ids"].shape, 0.5)),
        "shift": torch.tensor([random.random() for _ in samples]),
    }


def cut(source: Any, step: int, edges: list[int]) -> dict[str, Tensor]:
    batch = source.batch(step)
    parts = [batch.samples(a, b - a) for a, b in pairwise([0, *edges, batch.size]) if b > a]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@given(edges=st.lists(st.integers(0, 12), max_size=4).map(sorted), step=st.integers(0, 9))
@settings(deadline=None, max_examples=40)
def test_slices_are_padded_to_the_longest_of_the_global_batch_and_draw_by_sample(edges: list[int], step: int) -> None:
    source = DatasetSource(dataset=Texts(), batch_size=12, seed=1, lengths=LENGTHS, collate=masked)
    whole, parts = source.batch(step).samples(0, 12), cut(source, step, edges)
    longest = max(LENGTHS[int(row[0]) - 1] for row in whole["ids"])
    assert whole["ids"].shape == (12, longest)
    for name, tensor in whole.items():
        assert torch.equal(parts[name], tensor), name
    assert whole["shift"].unique().numel() == 12


def test_a_collator_that_draws_needs_one_shape_for_all() -> None:
    source = DatasetSource(dataset=Texts(), batch_size=12, seed=1, collate=masked)
    with pytest.raises(DataError, match=r"draws random numbers, .* pad to a fixed length, or give lengths"):
        source.batch(0).samples(0, 12)
    stream = StreamSource([[n] * 3 for n in range(20)], batch_size=6, seed=0, collate=masked)
    assert torch.equal(cut(stream, 1, [2, 3])["masked"], cut(stream, 1, [5])["masked"])


def test_drawing_in_a_collator_leaves_the_run_s_generators_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    DatasetSource(dataset=Texts(), batch_size=12, seed=1, lengths=LENGTHS, collate=masked).batch(0).samples(0, 5)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_what_a_collator_may_not_return_is_said() -> None:
    def returning(value: Any, **more: Any) -> None:
        DatasetSource(dataset=Texts(), batch_size=4, seed=0, collate=lambda _: value, **more).batch(0).samples(0, 1)

    with pytest.raises(DataError, match=r"samples \d+ were collated to None: let the collator return a mapping"):
        returning(None)
    with pytest.raises(DataError, match="the collator made a list"):
        returning([1], lengths=LENGTHS)
    with pytest.raises(DataError, match="makes no row for each of samples"):
        returning({"ids": torch.zeros(1, 30)}, lengths=LENGTHS)
    with pytest.raises(DataError, match=r"cannot be collated: .*equal size.*pad or pack them"):
        DatasetSource(dataset=[torch.zeros(n) for n in (1, 2)], batch_size=2, seed=0).batch(0).samples(0, 2)
