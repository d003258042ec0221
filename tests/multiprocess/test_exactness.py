"""Law 1 on real processes: whatever the plan, the loss and the gradients are those of one device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heterodyne.graph.ir import ModelGraph
from heterodyne.runtime.exact.verify import compare, one_device_gradients
from multiprocess.models import MIXING, NAMES, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import Shares, copied, worker_of

BAR = 1e-5
SEED, STEP = 5, 3


def errors_of(
    world: World, graph: ModelGraph, shares: Shares, bucket_bytes: int, dtype: torch.dtype
) -> list[tuple[str, float]]:
    """One step under the plan against one device, as each active rank sees it: the largest errors."""
    samples = sum(sum(sizes) for sizes in shares if sizes is not None)
    case = build(graph, samples, dtype=dtype)
    worker = worker_of(world, case, shares, bucket_bytes=bucket_bytes, seed=SEED)
    loss, gradients = worker.gradients(case.batch, STEP)
    gradients = copied(gradients)
    worker.close()
    alone = build(graph, samples, dtype=dtype)
    expected_loss, expected = one_device_gradients(
        alone.module,
        alone.batch,
        graph=case.graph,
        placement=worker.placement,
        device=torch.device("cpu"),
        precision="fp32",
        loss_count=case.count,
        seed=SEED,
        step=STEP,
    )
    if shares[world.rank] is None:
        assert not gradients, "an idle rank has none"
        return [("loss", compare(loss, {}, expected_loss, {}).loss)]
    found = compare(loss, gradients, expected_loss, expected)
    return [("loss", found.loss), *found.gradients[:2]]


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
    for errors in pool.run(len(shares), errors_of, captured(name), shares, bucket_bytes, torch.float32):
        assert all(error <= BAR for _, error in errors), errors


@pytest.mark.parametrize("name", MIXING)
@quick
@given(shares=plans_of_equal_counts(), bucket_bytes=st.sampled_from([1, 3000, 2**22]))
def test_batch_norm_sees_the_micro_batch_of_all_ranks(pool: Pool, name: str, shares: Shares, bucket_bytes: int) -> None:
    for errors in pool.run(len(shares), errors_of, captured(name), shares, bucket_bytes, torch.float32):
        assert all(error <= BAR for _, error in errors), errors


def test_a_backward_of_its_own_is_exact_where_the_module_runs(pool: Pool) -> None:
    graph = captured("custom")
    assert len(graph.module_only) == 4
    for errors in pool.run(3, errors_of, graph, ((3, 2), (1,), (4,)), 2000, torch.float32):
        assert all(error <= BAR for _, error in errors), errors


@pytest.mark.parametrize("name", NAMES)
def test_in_double_precision_only_rounding_is_left(pool: Pool, name: str) -> None:
    shares = ((3, 2), (1, 1), (), None, (2, 4))
    for errors in pool.run(5, errors_of, captured(name), shares, 2000, torch.float64):
        (_, of_loss), *of_gradients = errors
        assert of_loss <= 1e-7  # Transformers computes losses in single precision
        assert all(error <= 1e-12 for _, error in of_gradients), errors
