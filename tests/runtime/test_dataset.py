"""Map-style datasets: the order is the exact permutation for every life that a run may have, and a sample is read alike by all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from heterodyne.errors import DataError
from heterodyne.runtime.data.dataset import DatasetSource, balanced
from heterodyne.runtime.slices import BatchSource, OneShape
from runtime.schedules import live_through


class Numbers(Dataset[dict[str, Any]]):
    """Sample i is i, and numbers that are drawn at random."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"x": index, "noise": torch.stack([torch.rand(()), torch.tensor(np.random.rand() + random.random())])}


def ids(batch: BatchSource, first: int, count: int) -> list[int]:
    found = batch.samples(first, count)["x"].tolist()
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("seed", range(50))
def test_what_is_consumed_is_the_permutation_of_each_epoch_under_any_schedule(seed: int) -> None:
    dice = random.Random(1000 + seed)
    count, batch_size = dice.randint(1, 60), dice.randint(1, 16)
    steps = -(-2 * count // batch_size)

    def source(size: int = batch_size) -> DatasetSource:
        return DatasetSource(dataset=range(count), batch_size=size, seed=seed, collate=lambda x: {"x": torch.tensor(x)})

    consumed = live_through(source, ids, seed, batch_size=batch_size, steps=steps)
    assert sorted(consumed[:count]) == sorted(consumed[count : 2 * count]) == list(range(count))
    assert consumed == [int(n) for n in source(1).batch_at(0, steps * batch_size).indices]


def test_each_rank_reads_its_own_samples_and_no_others() -> None:
    dataset = Numbers(100)
    batch = DatasetSource(dataset=dataset, batch_size=8, seed=0).batch(3)
    assert not dataset.read
    assert batch.samples(2, 3)["x"].tolist() == dataset.read == batch.indices[2:5].tolist()
    with pytest.raises(ValueError, match="not in a batch of 8"):
        batch.samples(7, 2)


def test_what_a_dataset_draws_belongs_to_seed_epoch_and_sample_and_leaves_the_run_s_generators_alone() -> None:
    def drawn(position: int, size: int, seed: int = 0) -> torch.Tensor:
        batch = DatasetSource(dataset=Numbers(8), batch_size=8, seed=seed, shuffle=False).batch_at(position, size)
        return batch.samples(0, size)["noise"]

    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    whole = drawn(0, 16)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    random.seed(5)
    assert torch.equal(torch.cat([drawn(0, 3), drawn(3, 9), drawn(12, 4)]), whole)
    assert len({tuple(row.tolist()) for row in whole}) == 16, "every sample draws anew in each epoch"
    assert not torch.equal(drawn(0, 16, seed=1), whole)


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=80))
@settings(deadline=None)
def test_every_part_of_a_balanced_batch_has_its_share_of_the_tokens(lengths: list[int]) -> None:
    order = balanced(lengths)
    assert sorted(order) == list(range(len(lengths)))
    mean = sum(lengths) / len(lengths)
    given = np.cumsum([0, *(lengths[place] for place in order)])
    assert np.abs(given - mean * np.arange(len(lengths) + 1)).max() <= max(lengths) * (1 + 1e-9)


def test_balancing_changes_the_places_in_a_batch_and_nothing_else() -> None:
    lengths = [(7 * n) % 31 + 1 for n in range(100)]
    plain = DatasetSource(dataset=range(100), batch_size=32, seed=4)
    even = DatasetSource(dataset=range(100), batch_size=32, seed=4, lengths=lengths)
    for step in range(5):
        a, b = plain.batch(step), even.batch(step)
        assert sorted(zip(a.indices, a.epochs, strict=True)) == sorted(zip(b.indices, b.epochs, strict=True))

        def worst(indices: Sequence[int]) -> float:
            tokens = [lengths[i] for i in indices]
            return abs(sum(tokens[:20]) - sum(tokens) * 20 / 32)

        assert worst(b.indices.tolist()) <= max(lengths) / 2
    with pytest.raises(DataError, match="3 lengths for 100 samples"):
        DatasetSource(dataset=range(100), batch_size=32, seed=4, lengths=[1, 2, 3])


def test_validation_is_kept_apart_spread_and_always_the_same() -> None:
    source = DatasetSource(dataset=range(1000), batch_size=8, seed=0, validation_fraction=0.1)
    batches = source.validation_batches(20)
    held = np.concatenate([batch.indices for batch in batches])
    assert [batch.size for batch in batches] == [8, 8, 4]
    assert (np.diff(held) > 20).all()
    trained = source.batch_at(0, source.samples_per_epoch).indices
    assert len(trained) == 900
    assert not set(trained.tolist()) & set(held.tolist())
    own = DatasetSource(dataset=range(10), batch_size=4, seed=0, validation=range(100, 106))
    assert own.samples_per_epoch == 10
    read = [n for batch in own.validation_batches(99) for n in batch.samples(0, batch.size).tolist()]  # type: ignore[attr-defined]
    assert read == list(range(100, 106))
    with pytest.raises(DataError, match=r"too few to keep 0\.1 of them"):
        DatasetSource(dataset=range(3), batch_size=1, seed=0, validation_fraction=0.1)
    with pytest.raises(DataError, match="has no samples"):
        DatasetSource(dataset=[], batch_size=1, seed=0)


class Broken(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise RuntimeError("the file is gone")
        return {"x": torch.zeros(index)}


def test_a_sample_that_cannot_be_read_or_collated_is_named_with_the_line() -> None:
    with pytest.raises(
        DataError, match=r"(?s)sample 5 .* RuntimeError: the file is gone\n.*test_dataset\.py:\d+: raise"
    ):
        DatasetSource(dataset=Broken(6), batch_size=6, seed=0, shuffle=False).batch(0).samples(5, 1)
    with pytest.raises(DataError, match="samples 2, 3 cannot be collated: RuntimeError"):
        DatasetSource(dataset=Broken(6), batch_size=6, seed=0, shuffle=False).batch(0).samples(2, 2)


def test_where_the_model_is_cut_slices_of_several_shapes_are_refused() -> None:
    class Texts:
        size = 4

        def samples(self, first: int, count: int) -> dict[str, torch.Tensor]:
            return {"x": torch.zeros(count, 5 if first < 2 else 6)}

    source = OneShape(Texts(), {"x": 0})
    assert source.samples(0, 1)["x"].shape == (1, 5)
    assert source.samples(1, 3)["x"].shape == (3, 5)
    with pytest.raises(DataError, match=r"samples 2 to 4 have x of shape \[6\], others of the same batch \[5\]"):
        source.samples(2, 2)
