"""The order of samples and the split: what must hold for every text, length, seed and batch size."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from heterodyne.errors import DataError
from heterodyne.runtime.data.corpus import text_sources
from heterodyne.runtime.data.order import shuffled
from heterodyne.runtime.data.text import TextData, require_vocabulary
from heterodyne.runtime.data.tokens import TokenFile, open_tokens

fractions = st.one_of(st.just(0.0), st.floats(0.01, 0.9))


def text(count: int, *, length: int = 4, fraction: float = 0.1, batch: int = 3, seed: int = 0) -> TextData:
    tokens = np.arange(count, dtype=np.uint64).astype(np.uint8)
    file = TokenFile(path=Path("unused"), tokens=tokens, digest="d")
    return TextData(file=file, sequence_length=length, validation_fraction=fraction, batch_size=batch, seed=seed)


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_the_order_is_a_permutation_and_any_part_of_it_can_be_asked_for(count: int, seed: int, epoch: int) -> None:
    places = np.arange(count)
    order = shuffled(places, count, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(count))
    part = places[count // 3 : count // 2 + 1]
    assert (shuffled(part, count, seed=seed, epoch=epoch) == order[part]).all()


def test_seeds_and_epochs_give_orders_that_look_independent() -> None:
    """The correlation of two independent permutations of n has a standard deviation of 1 / sqrt(n - 1)."""
    count = 20_000
    places = np.arange(count)
    orders = [places] + [shuffled(places, count, seed=seed, epoch=epoch) for seed in (0, 1, 2) for epoch in (0, 1)]
    correlations = np.corrcoef(orders)[np.triu_indices(len(orders), k=1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(count - 1)
    neighbours = np.corrcoef(orders[1][:-1], orders[1][1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(count - 1)


def test_the_order_is_fixed_for_good() -> None:
    """A run is resumed years later, on another machine: these numbers may never change."""
    assert shuffled(np.arange(10), 10, seed=0, epoch=0).tolist() == [3, 5, 7, 8, 2, 4, 6, 0, 9, 1]


def test_places_outside_are_refused() -> None:
    for place in (-1, 5):
        with pytest.raises(ValueError, match="places must be in"):
            shuffled(np.array([place]), 5, seed=0, epoch=0)


@given(count=st.integers(200, 20_000), length=st.integers(1, 20), fraction=fractions)
@settings(deadline=None)
def test_training_and_validation_share_no_token_and_leave_none_out(count: int, length: int, fraction: float) -> None:
    assume(fraction == 0 or fraction * (count // length) >= 1)
    data = text(count, length=length, fraction=fraction)
    windows = np.concatenate([data.training_windows, data.validation_windows])
    assert sorted(windows) == list(range(count // length))
    wanted = fraction * (count // length)
    assert abs(len(data.validation_windows) - wanted) <= max(1.0, 64, 0.2 * wanted)
    assert bool(len(data.validation_windows)) == bool(fraction)


@given(batch=st.integers(1, 40), seed=st.integers(0, 100), fraction=fractions)
@settings(deadline=None, max_examples=25)
def test_every_epoch_sees_each_training_window_once_whatever_the_batch_size(
    batch: int, seed: int, fraction: float
) -> None:
    data = text(400, batch=batch, seed=seed, fraction=fraction)
    n = data.samples_per_epoch
    steps = -(-2 * n // batch)
    seen = np.concatenate([data.batch(step).windows for step in range(steps)])
    assert sorted(seen[:n]) == data.training_windows.tolist()
    assert sorted(seen[n : 2 * n]) == data.training_windows.tolist()
    other = text(400, batch=1, seed=seed, fraction=fraction)
    assert seen[: 2 * n].tolist() == [int(other.batch(step).windows[0]) for step in range(2 * n)]
    assert n < 20 or seen[:n].tolist() != seen[n : 2 * n].tolist(), "epochs are shuffled anew"


@pytest.mark.tour("runtime/data/")
@given(cuts=st.lists(st.integers(0, 16), max_size=5), step=st.integers(0, 10_000))
@settings(deadline=None, max_examples=50)
def test_any_way_to_share_a_batch_gives_the_same_samples(cuts: list[int], step: int) -> None:
    data = text(5000, batch=16)
    whole = data.batch(step).samples(0, 16)
    edges = [0, *sorted(cuts), 16]
    parts = [data.batch(step).samples(a, b - a) for a, b in pairwise(edges)]
    for key, tensor in whole.items():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (16, 4)
        assert torch.equal(torch.cat([part[key] for part in parts]), tensor)
    assert torch.equal(whole["labels"], whole["input_ids"])


def test_a_sample_is_the_text_of_its_window() -> None:
    data = text(5000)
    batch = data.batch(7)
    for row, window in zip(batch.samples(0, 3)["input_ids"], batch.windows, strict=True):
        assert row.tolist() == [(int(window) * 4 + place) % 256 for place in range(4)]
    with pytest.raises(ValueError, match="not in a batch of 3"):
        batch.samples(2, 2)


def test_validation_is_always_the_same_and_spread_over_the_text() -> None:
    data = text(100_000, batch=8)
    batches = data.validation_batches(20)
    assert [batch.size for batch in batches] == [8, 8, 4]
    windows = np.concatenate([batch.windows for batch in batches])
    assert np.isin(windows, data.validation_windows).all()
    assert len(set(windows.tolist())) == 20
    assert windows[-1] - windows[0] > 0.8 * 25_000
    again = np.concatenate([batch.windows for batch in text(100_000, batch=8, seed=9).validation_batches(20)])
    assert windows.tolist() == again.tolist()
    everything = data.validation_batches(10**9)
    assert sum(batch.size for batch in everything) == len(data.validation_windows)
    assert text(100, fraction=0.0).validation_batches(5) == ()


@pytest.mark.parametrize(
    ("count", "fraction", "told"),
    [
        (3, 0.0, "has 3 bytes, one sequence needs 4"),
        (8, 0.1, "too few to keep 0.1 of it for validation"),
        (4, 0.9, "validation takes all"),
    ],
)
def test_too_little_text_says_how_much_there_is_and_what_is_needed(count: int, fraction: float, told: str) -> None:
    with pytest.raises(DataError, match=told):
        text(count, fraction=fraction)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.33])
def test_the_length_that_is_told_is_enough_and_no_less_is(fraction: float) -> None:
    with pytest.raises(DataError, match="too few") as caught:
        text(4, fraction=fraction)
    least = int(str(caught.value).split("(that takes ")[1].split(")")[0])
    text(least, fraction=fraction)
    with pytest.raises(DataError):
        text(least - 1, fraction=fraction)


def test_the_whole_way_from_files(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"".join(b"line %d\n" % n for n in range(500)))
    file = open_tokens(text_sources("text.txt", base=tmp_path), tmp_path / "cache", say=lambda _: None)
    data = TextData(file=file, sequence_length=16, validation_fraction=0.1, batch_size=4, seed=1)
    assert bytes(data.file.tokens[:7]) == b"line 0\n"
    assert data.batch(0).samples(1, 2)["input_ids"].shape == (2, 16)


def test_a_model_with_too_small_a_vocabulary_is_refused() -> None:
    require_vocabulary(256, model="gpt")
    with pytest.raises(DataError, match="gpt has a vocabulary of 255, text as bytes needs 256"):
        require_vocabulary(255, model="gpt")
