"""Law 1 on real processes: whatever the plan, the loss and the gradients are those of one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from multiprocess.exactness import Replicas, require_exact
from multiprocess.models import MIXING, NAMES, captured
from multiprocess.pool import Pool
from multiprocess.work import Shares


@st.composite
def plans(draw: st.DrawFn) -> Shares:
    """2 to 5 ranks, some idle, some without samples, micro-batches of any sizes."""
    world = draw(st.integers(2, 5))
    sizes = st.one_of(st.none(), st.lists(st.integers(1, 4), max_size=3).map(tuple))
    shares = draw(st.lists(sizes, min_size=world, max_size=world))
    if not any(shares):
        shares[draw(st.integers(0, world - 1))] = (2, 1)
    return tuple(shares)


@st.composite
def plans_of_equal_counts(draw: st.DrawFn) -> Shares:
    """As models that mix samples need it: ranks with samples have the same number of micro-batches."""
    world, count = draw(st.integers(2, 5)), draw(st.integers(1, 3))
    sizes = st.one_of(st.none(), st.just(()), st.lists(st.integers(1, 4), min_size=count, max_size=count).map(tuple))
    shares = draw(st.lists(sizes, min_size=world, max_size=world))
    if sum(sum(s or ()) for s in shares) < 2:
        shares[draw(st.integers(0, world - 1))] = (2,) * count
    return tuple(shares)


quick = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MIXING])
@quick
@given(shares=plans(), bucket_bytes=st.sampled_from([1, 3000, 2**22]))
def test_loss_and_gradients_are_those_of_one_device(pool: Pool, name: str, shares: Shares, bucket_bytes: int) -> None:
    require_exact(pool, name, Replicas(shares, bucket_bytes))


@pytest.mark.parametrize("name", MIXING)
@quick
@given(shares=plans_of_equal_counts(), bucket_bytes=st.sampled_from([1, 3000, 2**22]))
def test_batch_norm_sees_the_micro_batch_of_all_ranks(pool: Pool, name: str, shares: Shares, bucket_bytes: int) -> None:
    require_exact(pool, name, Replicas(shares, bucket_bytes))


def test_a_backward_of_its_own_is_exact_where_the_module_runs(pool: Pool) -> None:
    assert len(captured("custom").module_only) == 4
    require_exact(pool, "custom", Replicas(((3, 2), (1,), (4,)), 2000))


@pytest.mark.parametrize("name", NAMES)
def test_in_double_precision_only_rounding_is_left(pool: Pool, name: str) -> None:
    shares = ((3, 2), (1, 1), (), None, (2, 4))
    # Transformers computes losses in single precision.
    require_exact(pool, name, Replicas(shares, 2000), torch.float64, loss_bar=1e-7, bar=1e-12)
