"""Each sample comes once an epoch, in the global batches of PyTorch's sampler, whatever the shares are and whenever they change."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler as EqualSampler

from heterodyne.drop_in import DistributedSampler
from heterodyne.drop_in.pace import better_counts
from heterodyne.errors import CheckpointError, DataError, HeterodyneError

Batches = list[list[int]]
T = TypeVar("T")


def flat(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def samplers(
    size: int, shares: list[float] | None, ranks: int, batch_size: int, **options: object
) -> list[DistributedSampler]:
    return [
        DistributedSampler(range(size), ranks, rank, batch_size=batch_size, shares=shares, **options)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


def epoch(of: list[DistributedSampler]) -> list[list[list[int]]]:
    """Batches of an epoch, by rank, each as a loader that hands out what was dealt: a sample that counts nothing is left out."""
    found = []
    for sampler in of:
        sampler.read_ahead()
        found.append([batch if sampler.hand_out().own else [] for batch in sampler])
        sampler.end()
    return found


cases = st.tuples(
    st.integers(1, 70),
    st.integers(1, 5),
    st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.tour("drop_in/")
@given(cases)
def test_each_global_batch_is_that_of_ddp(case: tuple[int, int, list[float], bool, bool]) -> None:
    size, batch_size, shares, shuffle, drop_last = case
    ranks = len(shares)
    of = samplers(size, shares, ranks, batch_size, shuffle=shuffle, drop_last=drop_last, seed=3)
    for sampler in of:
        sampler.set_epoch(2)
    by_rank = epoch(of)
    together = [flat(batches[step] for batches in by_rank) for step in range(len(by_rank[0]))]
    assert {len(batches) for batches in by_rank} == {len(of[0])}
    assert (
        len(set(flat(together))) == sum(map(len, together)) == (len(of[0]) * batch_size * ranks if drop_last else size)
    )
    equal = [EqualSampler(range(size), ranks, rank, shuffle=shuffle, seed=3) for rank in range(ranks)]  # type: ignore[arg-type]
    for sampler in equal:
        sampler.set_epoch(2)
    theirs = [list(sampler) for sampler in equal]
    for step in range(size // (batch_size * ranks)):
        of_ddp = flat(own[step * batch_size : (step + 1) * batch_size] for own in theirs)
        assert sorted(of_ddp) == sorted(together[step])


@given(cases, st.integers(1, 6), st.integers(1, 5))
def test_an_epoch_goes_on_where_it_was_left_also_with_other_ranks(
    case: tuple[int, int, list[float], bool, bool], done: int, ranks: int
) -> None:
    size, batch_size, shares, shuffle, _ = case
    of = samplers(size, shares, len(shares), batch_size, shuffle=shuffle)
    seen: list[int] = []
    for sampler in of:
        sampler.set_epoch(1)
        sampler.read_ahead()
        for _, batch in zip(range(done), sampler, strict=False):
            seen += batch if sampler.hand_out().own else []
    states = [sampler.state_dict() for sampler in of]
    assert states == [states[0]] * len(of)
    of[0].set_epoch(5)
    assert of[0].state_dict()["samples"] == 0, "nothing of an epoch that has not begun"
    then = samplers(size, None, ranks, batch_size, shuffle=shuffle)
    for sampler in then:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(1)  # as loops do at the begin of each
    rest = flat(flat(epoch(then)))
    assert sorted(seen + rest) == list(range(size))
    assert sorted(flat(flat(epoch(then)))) == list(range(size)), "the next epoch is whole"


def test_shares_of_a_checkpoint_are_kept_unless_they_are_given_by_hand() -> None:
    (found,) = samplers(8, None, 1, 2)
    found.renew([3.0], 0)
    state = found.state_dict()
    assert state["shares"] == [3.0]
    for given_shares, wanted in ((None, (3.0,)), ([2.0], (2.0,))):
        (then,) = samplers(8, given_shares, 1, 2)
        then.load_state_dict(state)
        assert then.shares == wanted
    with pytest.raises(CheckpointError, match="samples"):
        found.load_state_dict({"epoch": 1})


@given(st.integers(0, 4), st.integers(0, 4))
def test_new_shares_begin_at_a_batch_that_no_rank_has_drawn(ahead: int, behind: int) -> None:
    """Ranks whose loaders read ahead by unlike numbers of batches are told at the same step."""
    of = samplers(64, None, 2, 4, shuffle=False)
    told = 2
    next(iter(of[0]))  # this rank has looked at a batch by itself
    found = [iter(sampler) for sampler in of]
    dealt: list[Batches] = [[], []]
    for rank, more in enumerate((ahead, behind)):
        of[rank].read_ahead()
        dealt[rank] += [next(found[rank]) for _ in range(told + more)]
    begin = max(sampler.drawn for sampler in of)
    for rank in (0, 1):
        of[rank].renew([3.0, 1.0], begin)
        dealt[rank] += list(found[rank])
    for step, (first, second) in enumerate(zip(*dealt, strict=True)):
        assert first + second == list(range(8 * step, 8 * step + 8))
        assert len(first) == (4 if step < told + max(ahead, behind) else 6)


def test_a_sampler_says_what_it_lacks() -> None:
    with pytest.raises(DataError, match="prepare_loader"):
        next(iter(DistributedSampler(range(4), 2, 0)))
    with pytest.raises(HeterodyneError, match=r"\[1, 0\].*2 ranks"):
        DistributedSampler(range(4), 2, 0, batch_size=1, shares=[1, 0])
    with pytest.raises(DataError, match=r"1 samples for 2 ranks.*drop_last=True"):
        list(DistributedSampler(range(5), 2, 1, batch_size=1))


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6), st.integers(6, 200))
def test_shares_change_only_for_a_clearly_shorter_step(sample_s: list[float], total: int) -> None:
    counts = [total // len(sample_s)] * len(sample_s)
    better = better_counts(counts, sample_s)
    slowest = max(n * s for n, s in zip(counts, sample_s, strict=True))
    if better is not None:
        assert sum(better) == sum(counts)
        assert max(n * s for n, s in zip(better, sample_s, strict=True)) * 1.03 < slowest
        assert better_counts(better, sample_s) is None, "what is found is as good as it gets"
    else:
        least = sum(counts) / sum(1 / s for s in sample_s)  # if samples could be cut
        assert slowest <= 1.03 * (least + max(sample_s)) + 1e-9


def test_equal_devices_keep_equal_shares() -> None:
    assert better_counts([8, 8, 8], [0.1, 0.1001, 0.1]) is None
    assert torch.equal(torch.tensor(better_counts([8, 8, 8], [0.1, 0.2, 0.2])), torch.tensor([12, 6, 6]))
