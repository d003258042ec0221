"""Several steps under a plan end where the same steps on one device end."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heterodyne.errors import DataError
from heterodyne.frontend import trace
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.placement import Placement
from heterodyne.runtime.exact.verify import compare
from multiprocess.exactness import train_alone
from multiprocess.models import MIXING, NAMES, Case, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, Shares, StageOf, cluster_of, plan_of, staged_worker, worker_of

SHARES: Shares = ((3, 1), (2, 2), (1, 2))
WITH_EMPTY: Shares = (None, (3, 1), (), (4, 2))
STEPS = 3

# A gradient that is zero up to rounding must not become a whole step of Adam: hence the large eps.
ADAMW = OptimizerSection(name="adamw", lr=1e-2, eps=1e-3, warmup_steps=2)
SGD = OptimizerSection(name="sgd", lr=1e-1, momentum=0.9, weight_decay=0.01)


def samples_of(shares: Shares) -> int:
    return sum(sum(sizes or ()) for sizes in shares)


def stored(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def train(
    world: World, graph: ModelGraph, shares: Shares, section: OptimizerSection, clip: float
) -> tuple[list[float], Any]:
    """Losses and what is stored in the end, on every rank."""
    case = build(graph, samples_of(shares))
    worker = worker_of(world, case, shares, optimizer=section, clip=clip)
    losses = [worker.step(case.batch).loss for _ in range(STEPS)]
    worker.state.state_dict()  # ranks without samples are given what the others have
    return losses, stored(case.module)


def train_on_one_device(
    graph: ModelGraph, shares: Shares, section: OptimizerSection, clip: float
) -> tuple[list[float], dict[str, Tensor]]:
    cluster = cluster_of(len(shares))
    placement = Placement.of(plan_of(graph, cluster, shares), cluster)
    losses, _, state = train_alone(build(graph, samples_of(shares)), placement, section, STEPS, clip)
    return losses, state


@pytest.mark.parametrize(("section", "clip"), [(ADAMW, 0.5), (SGD, 0.0)], ids=["adamw, clipped", "sgd"])
@pytest.mark.parametrize("name", NAMES)
def test_training_ends_where_one_device_ends(pool: Pool, name: str, section: OptimizerSection, clip: float) -> None:
    shares = SHARES if name in MIXING else WITH_EMPTY
    expected_losses, expected = train_on_one_device(captured(name), shares, section, clip)
    results = pool.run(len(shares), train, captured(name), shares, section, clip)
    for losses, found in results:
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        # Parameters and running statistics, each relative to its own norm.
        errors = compare(losses[-1], found, expected_losses[-1], expected)
        assert errors.largest <= 1e-5, errors.gradients[:2]


@pytest.mark.parametrize("name", ["gpt2", "mixed"])
def test_two_runs_are_equal_bit_for_bit_and_so_are_all_ranks(pool: Pool, name: str) -> None:
    first = pool.run(3, train, captured(name), SHARES, ADAMW, 0.5)
    second = pool.run(3, train, captured(name), SHARES, ADAMW, 0.5)
    for losses, found in [*first, *second]:
        assert losses == first[0][0]
        for key, value in first[0][1].items():
            # Running statistics included: every rank saw the same ones.
            assert torch.equal(found[key], value), key


def go_on(world: World, graph: ModelGraph, before: Shares, after: Shares) -> tuple[list[float], list[float]]:
    """Losses undisturbed, and losses of a second model that takes over the state in the middle."""
    case = build(graph, samples_of(before))
    worker = worker_of(world, case, before, clip=1.0)
    worker.step(case.batch)
    state = copy.deepcopy(worker.state.state_dict())
    losses = [worker.step(case.batch).loss for _ in range(2)]
    other = build(graph, samples_of(after), seed=1)
    resumed = worker_of(world, other, after, clip=1.0)
    resumed.state.load_state_dict(state)
    return losses, [resumed.step(case.batch).loss for _ in range(2)]


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_going_on_from_a_state_changes_no_bit(pool: Pool, name: str) -> None:
    for undisturbed, resumed in pool.run(3, go_on, captured(name), SHARES, SHARES):
        assert resumed == undisturbed


@pytest.mark.parametrize("after", [((2, 2, 1), (6,), ()), (None, (5, 5), (1,)), ((11,), None, None)])
def test_going_on_under_another_plan_changes_only_the_rounding(pool: Pool, after: Shares) -> None:
    for undisturbed, resumed in pool.run(3, go_on, captured("gpt2"), SHARES, after):
        assert resumed == pytest.approx(undisturbed, rel=1e-5)


def count_nothing(world: World, graph: ModelGraph) -> str:
    case = build(graph, 6)
    worker = worker_of(world, case, ((4,), (2,), (), None))
    case.batch["labels"].fill_(-100)
    try:
        worker.step(case.batch)
    except DataError as error:
        return str(error)
    return "no error"


def test_a_batch_in_which_nothing_counts_is_refused_on_every_rank(pool: Pool) -> None:
    for told in pool.run(4, count_nothing, captured("bert")):
        assert "no sample of the global batch has a label" in told


def evaluate_sizes(world: World, graph: ModelGraph, sizes: tuple[int, ...]) -> list[float]:
    case = build(graph, samples_of(WITH_EMPTY))
    worker = worker_of(world, case, WITH_EMPTY)
    return [worker.evaluate(build(graph, size).batch) for size in sizes]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_evaluation_is_that_of_one_device_for_a_batch_of_any_size(pool: Pool, name: str) -> None:
    sizes = (1, 2, 7, 25)
    graph = captured(name)
    module = build(graph, samples_of(WITH_EMPTY)).module.eval()
    expected = [module(**build(graph, size).batch).loss.item() for size in sizes]
    for losses in pool.run(4, evaluate_sizes, graph, sizes):
        assert losses == pytest.approx(expected, rel=1e-5)


def start_unlike(world: World, graph: ModelGraph) -> dict[str, Tensor]:
    with torch.device("meta" if world.rank == 1 else "cpu"):
        case = build(graph, 4, seed=world.rank)
    worker_of(world, case, ((2,), (1,), (1,)))
    assert case.module.head.weight is case.module.tokens.weight
    return stored(case.module)


def test_every_rank_begins_with_the_weights_of_rank_0(pool: Pool) -> None:
    expected = stored(build(captured("gpt"), 4, seed=0).module)
    for found in pool.run(3, start_unlike, captured("gpt")):
        assert all(torch.equal(found[key], value) for key, value in expected.items())


class Checkpointed(nn.Module):
    """BatchNorm in a part that is run once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: torch.tanh(self.norm(self.first(h))), x, use_reentrant=False)
        return self.head(hidden).pow(2).mean()


def train_checkpointed(world: World, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found, module = trace(Checkpointed(), batch), Checkpointed()
    case = Case(module=module, graph=found.graph, batch=batch)
    stages = (StageOf(len(found.graph.ops), (0, 1), (3, 5)),)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    worker = staged_worker(world, case, [PipelineOf((8,), stages)], "1F1B", optimizer=sgd, capture=found)
    for _ in range(STEPS):
        worker.step(batch)
    worker.close()
    return stored(module)


def test_batchnorm_in_a_checkpoint_counts_its_batches_as_on_one_device(pool: Pool) -> None:
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))}
    module = Checkpointed()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        module(**batch).backward()
        optimizer.step()
    assert module.norm.num_batches_tracked == 2 * STEPS
    for found in pool.run(2, train_checkpointed, batch):
        torch.testing.assert_close(found, stored(module), rtol=1e-5, atol=1e-6)
