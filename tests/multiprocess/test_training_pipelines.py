"""Training under pipelines goes where one device goes, is the same each time, and can be taken over by another plan."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.placement import Placement
from heterodyne.runtime.checkpoint.export import WEIGHTS, export_model
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.verify import compare
from heterodyne.runtime.weights.pieces import joined
from heterodyne.runtime.worker import Worker
from multiprocess.exactness import SEED, train_alone
from multiprocess.models import Case, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, copied, go_on, save, staged_plan, staged_worker

STEPS, CLIP, SAMPLES = 10, 0.5, 9
# A gradient that is zero up to rounding must not become a whole step of Adam: hence the large eps.
ADAMW = OptimizerSection(name="adamw", lr=1e-2, eps=1e-3, warmup_steps=2)

Spread = tuple[str, tuple[PipelineOf, ...]]


def cut(
    graph: ModelGraph, at: Sequence[float], homes: Sequence[tuple[int, ...]], *, recompute: bool = False
) -> tuple[StageOf, ...]:
    """Cut at these parts of the ops; with ``recompute``, every block that is whole in a stage is computed again there."""
    ops, start, stages = len(graph.ops), 0, []
    for part, ranks in zip([*at, 1.0], homes, strict=True):
        stop = round(part * ops)
        again = tuple(n for n, b in enumerate(graph.blocks) if start <= b.start < b.stop <= stop) if recompute else ()
        stages.append(StageOf(stop, ranks, tuple(2 - n % 2 for n in range(len(ranks))), again))
        start = stop
    return tuple(stages)


def chain(graph: ModelGraph) -> Spread:
    """Three unequal stages, the one in the middle on two devices; the last micro-batch is smaller."""
    return "1F1B", (PipelineOf((2, 2, 2, 2, 1), cut(graph, (0.3, 0.7), ((0,), (1, 2), (3,)))),)


def v_shape(graph: ModelGraph) -> Spread:
    """Two stages a device, backwards in halves, everything recomputed; and an idle device."""
    homes = ((3,), (1,), (1,), (3,))
    return "ZBVZeroBubble", (PipelineOf((1, 2, 3, 2, 1), cut(graph, (0.2, 0.5, 0.8), homes, recompute=True)),)


def unlike(graph: ModelGraph) -> Spread:
    """Two pipelines of different depth, with recompute ahead of the wait in one of them."""
    deep = PipelineOf((2, 1, 2, 1), cut(graph, (0.4, 0.6), ((2,), (0,), (1,)), recompute=True))
    return "ShiftedCriticalPath", (deep, PipelineOf((3,), cut(graph, (), ((3,),))))


def in_parts(graph: ModelGraph) -> Spread:
    """Two stages, the second in parts, so that devices hold unequal boxes of a tied weight; a replica on a device of its own."""
    ops = len(graph.ops)
    stages = (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1, 2), (2, 1), kind="split"))
    return "1F1B", (PipelineOf((3, 2), stages), PipelineOf((4,), (StageOf(ops, (3,), (1,)),)))


def meshed(graph: ModelGraph) -> Spread:
    """Two rows that take unequal shares of the samples, each with the weights in unequal parts; the last one is without a sample."""
    stage = StageOf(len(graph.ops), (2, 0, 1, 3), (1, 2), kind="split", rows=(2, 1))
    return "1F1B", (PipelineOf((3, 2, 3, 1), (stage,)),)


def crossed(graph: ModelGraph) -> Spread:
    """Sequences in parts along one axis, weights along the other."""
    stage = StageOf(len(graph.ops), (1, 0, 3, 2), (2, 1), kind="context", inner=(("split", (1, 2)),))
    return "1F1B", (PipelineOf((3, 2, 3, 1), (stage,)),)


SPREADS = (chain, v_shape, unlike)


def worker_under(world: World, case: Case, spread: Spread, optimizer: Any = ADAMW, **more: Any) -> Worker:
    schedule, pipelines = spread
    return staged_worker(world, case, pipelines, schedule, clip=CLIP, optimizer=optimizer, seed=SEED, **more)


def train(
    world: World,
    graph: ModelGraph,
    spread: Spread,
    steps: int,
    optimizer: Any = ADAMW,
    more: dict[str, Any] | None = None,
) -> tuple[list[float], list[Any], dict[str, Tensor], int]:
    """Losses, norms, what the model has become, and how many elements the optimizer kept two moments of."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread, optimizer, **(more or {}))
    results = [worker.step(case.batch) for _ in range(steps)]
    state = copied(worker.state.state_dict()["model"])
    kept = sum(p.numel() for p in worker.optimizer.state)
    worker.close()
    return [r.loss for r in results], [r.grad_norm for r in results], state, kept


def train_on_one_device(
    graph: ModelGraph, spread: Spread, steps: int = STEPS, optimizer: Any = ADAMW
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    cluster = cluster_of(4)
    placement = Placement.of(staged_plan(graph, cluster, spread[1], spread[0]), cluster)
    return train_alone(build(graph, SAMPLES), placement, optimizer, steps, CLIP)


@pytest.mark.parametrize(
    ("name", "spread"),
    [
        ("gpt2", chain),
        ("gpt2", in_parts),
        ("gpt2", meshed),
        ("gpt2", crossed),
        ("t5", v_shape),
        ("t5", unlike),
        ("resnet", v_shape),
    ],
)
def test_ten_steps_are_those_of_one_device(pool: Pool, name: str, spread: Any) -> None:
    graph = captured(name)
    expected_losses, expected_norms, expected = train_on_one_device(graph, spread(graph))
    for losses, norms, state, _ in pool.run(4, train, graph, spread(graph), STEPS):
        assert losses[:5] == pytest.approx(expected_losses[:5], rel=1e-5)
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert compare(0.0, state, 0.0, expected).largest <= 1e-3


@pytest.mark.parametrize("spread", SPREADS)
def test_two_runs_are_equal_bit_for_bit(pool: Pool, spread: Any) -> None:
    graph = captured("gpt2")
    first = pool.run(4, train, graph, spread(graph), 4)
    second = pool.run(4, train, graph, spread(graph), 4)
    for losses, _, state, _ in [*first, *second]:
        assert losses == first[0][0]
        for key, value in first[0][2].items():
            assert torch.equal(state[key], value), key


def one_after_the_other(world: World, graph: ModelGraph, spreads: Sequence[Spread]) -> list[int]:
    """How many process groups there are: before, and after each worker was closed."""
    with Communicator(rank=world.rank, world_size=world.world_size, device=torch.device("cpu")) as communicator:
        counts = [len(dist.distributed_c10d._world.pg_map)]
        for schedule, pipelines in spreads:
            case = build(graph, SAMPLES)
            worker = staged_worker(world, case, pipelines, schedule, clip=CLIP, communicator=communicator)
            worker.step(case.batch)
            worker.close()
            counts.append(len(dist.distributed_c10d._world.pg_map))
            worker.state.state_dict()  # what a worker knows can still be asked for
    return counts


def test_a_closed_worker_leaves_its_groups(pool: Pool) -> None:
    graph = captured("gpt2")
    for counts in pool.run(4, one_after_the_other, graph, [spread(graph) for spread in SPREADS]):
        assert len(set(counts)) == 1


def take_over(
    world: World, graph: ModelGraph, before: Spread, after: Spread, folder: Path, zeros: tuple[int, int] = (0, 0)
) -> tuple[list[float], list[float]]:
    """Losses undisturbed; and those of another model, with other weights, that takes over from a checkpoint in the middle."""
    case, other = build(graph, SAMPLES), build(graph, SAMPLES, seed=1)
    worker = worker_under(world, case, before, zero=zeros[0])
    for _ in range(2):
        worker.step(case.batch)
    alone = patch.object(ProcessGroup, "broadcast", side_effect=AssertionError("a checkpoint brings nothing together"))
    with alone if zeros[0] else nullcontext():
        save(worker, folder)
    losses = [worker.step(case.batch).loss for _ in range(3)]
    worker.close()
    resumed = worker_under(world, other, after, zero=zeros[1])
    held = {n for n, entry in other.module.state_dict().items() if not entry.is_meta}
    own_bytes = 2 * sum(
        p.nbytes for group in resumed.optimizer.param_groups for p in group["params"]
    )  # moments of AdamW
    whole_tensors: list[weakref.ref[Tensor]] = []

    def one_at_a_time(*given: Any) -> Tensor:
        assert before != after or zeros[0] != zeros[1], "a rank reads what it had"
        there = sum(tensor.nbytes for of in whole_tensors if (tensor := of()) is not None)
        assert there <= own_bytes or resumed.ownership.whole, "tensors of others are whole, and stay"
        found = joined(*given)
        whole_tensors.append(weakref.ref(found))
        return found

    with patch("heterodyne.runtime.weights.pieces.joined", one_at_a_time):
        state = go_on(resumed, folder)
    if not zeros[1]:
        assert set(state.get("model", {})) == held, "a rank reads what it holds, and no more"
    assert resumed.steps_done == 2
    return losses, [resumed.step(case.batch).loss for _ in range(3)]


@pytest.mark.parametrize("spread", [*SPREADS, meshed])
def test_a_resumed_run_changes_no_bit(pool: Pool, spread: Any, tmp_path: Path) -> None:
    graph = captured("gpt2")
    for undisturbed, resumed in pool.run(4, take_over, graph, spread(graph), spread(graph), tmp_path):
        assert resumed == undisturbed


def whole(graph: ModelGraph) -> Spread:
    """No cut at all."""
    return "1F1B", (PipelineOf((2, 2), cut(graph, (), ((2,),))), PipelineOf((5,), cut(graph, (), ((1,),))))


@pytest.mark.parametrize(
    ("before", "after"),
    [(chain, v_shape), (v_shape, unlike), (unlike, meshed), (meshed, crossed), (crossed, whole), (whole, chain)],
)
def test_another_plan_goes_on_from_a_checkpoint(pool: Pool, before: Any, after: Any, tmp_path: Path) -> None:
    graph = captured("t5")
    for undisturbed, resumed in pool.run(4, take_over, graph, before(graph), after(graph), tmp_path):
        assert resumed == pytest.approx(undisturbed, rel=1e-5)


def evaluate_sizes(world: World, graph: ModelGraph, spread: Spread, sizes: tuple[int, ...]) -> list[float]:
    """The losses of batches of several sizes; neither evaluation nor step disturbs the other."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread)
    losses = [worker.evaluate(build(graph, size).batch) for size in sizes]
    before = worker.gradients(case.batch)[0]
    assert worker.evaluate(build(graph, sizes[0]).batch) == losses[0]
    assert worker.gradients(case.batch)[0] == before
    return losses


@pytest.mark.parametrize(("name", "spread"), [("gpt2", v_shape), ("t5", chain), ("bert", unlike)])
def test_evaluation_is_that_of_one_device(pool: Pool, name: str, spread: Any) -> None:
    sizes = (1, 2, 7, 25)
    graph = captured(name)
    module = build(graph, SAMPLES).module.eval()
    expected = [module(**build(graph, size).batch).loss.item() for size in sizes]
    for losses in pool.run(4, evaluate_sizes, graph, spread(graph), sizes):
        assert losses == pytest.approx(expected, rel=1e-5)


def export(world: World, graph: ModelGraph, spread: Spread, folder: Path) -> float:
    """Train a step, write the weights from rank 0, and what the loss is then."""
    case = build(graph, SAMPLES)
    worker = worker_under(world, case, spread)
    worker.step(case.batch)
    weights = worker.state.weights()
    assert bool(weights) == (world.rank == 0)
    if world.rank == 0:
        export_model(worker.module, folder / "model", weights)
    return worker.evaluate(case.batch)


@pytest.mark.parametrize(("name", "spread"), [("gpt2", chain), ("gpt", unlike), ("gpt", v_shape)])
def test_weights_are_exported_whole(pool: Pool, name: str, spread: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    graph = captured(name)
    losses = pool.run(4, export, graph, spread(graph), tmp_path)
    if name == "gpt2":
        from transformers import GPT2LMHeadModel

        module: Any = GPT2LMHeadModel.from_pretrained(tmp_path / "model").eval()
    else:
        module = build(graph, SAMPLES, seed=2).module.eval()
        module.load_state_dict(load_file(tmp_path / "model" / WEIGHTS))
    batch = build(graph, SAMPLES).batch
    found = module(**batch)
    loss = getattr(found, "loss", found)
    assert losses == [pytest.approx(loss.item(), rel=1e-5)] * 4
