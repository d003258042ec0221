"""Law 1 for models that nobody has thought of: stages in parts give the loss and the gradients of one device, whatever the ops.

HETERODYNE_RANDOM_GRAPHS says how many graphs are tried (3 if it is not set).
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from heterodyne.api.stage_cutting import StageCutter
from heterodyne.errors import CaptureError
from heterodyne.graph.cut import stage_ops
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.check import violations
from heterodyne.plan.lower import lower
from heterodyne.plan.plan import Exchange, Plan
from heterodyne.plan.sharded_stage import shard_stage
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.worker import Worker
from multiprocess.exactness import BAR, SEED, Errors, compared
from multiprocess.models import Case
from multiprocess.pool import Pool, World
from multiprocess.split.random_graphs import Program, Value, Written, captured_program, program
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan
from pure.graph.sharding.consistency import inconsistencies

GRAPHS = int(os.environ.get("HETERODYNE_RANDOM_GRAPHS", "3"))
KINDS = ("split", "context", "replicate")
LATENCIES = (0, 64, 2**16)
FLOPS = (1, 50, 5000)
SHARES = (0, 1, 1, 2, 2, 3)  # who has none has nothing of what is cut


@dataclass(frozen=True)
class Lie:
    """How the model lies on all ranks: as a whole, and the runs of lines that are TaskGraphs. ``sizes``: of the micro-batches."""

    sizes: tuple[int, ...]
    kind: str
    shares: tuple[int, ...]
    marked: tuple[tuple[str, str, tuple[int, ...]], ...]
    exchange: Exchange


def lies(graph: ModelGraph, random: Random) -> list[Lie]:
    """In parts, by its sequence, and both beside replicated regions, on as many devices; those of them that can run."""
    members = random.choice((2, 2, 3))

    def shares() -> tuple[int, ...]:
        drawn = tuple(random.choice(SHARES) for _ in range(members))
        return drawn if any(drawn) else (1,) * members

    def lie(kind: str, *, mixed: bool) -> Lie:
        names = [task_graph.name for task_graph in graph.task_graphs if mixed]
        return Lie(
            sizes=tuple(random.choice((2, 3)) for _ in range(random.choice((1, 2)))),
            kind=kind,
            shares=shares(),
            marked=tuple((name, random.choice(KINDS), shares()) for name in names),
            exchange=Exchange(latency_bytes=random.choice(LATENCIES), flops_per_byte=random.choice(FLOPS)),
        )

    whole = [lie("split", mixed=False), lie("context", mixed=False)]
    mixed = [lie("replicate", mixed=True), lie(random.choice(KINDS), mixed=True)] if graph.task_graphs else []
    return [way for way in (*whole, *mixed) if _runs(way, graph)]


def plan_of(graph: ModelGraph, way: Lie) -> Plan:
    stage = StageOf(len(graph.ops), tuple(range(len(way.shares))), way.shares, kind=way.kind, marked=way.marked)
    plan = staged_plan(graph, cluster_of(len(way.shares)), [PipelineOf(way.sizes, (stage,))], "1F1B")
    (pipeline,) = plan.pipelines
    priced = pipeline.stages[0].model_copy(update={"exchange": way.exchange})
    return plan.model_copy(update={"pipelines": (pipeline.model_copy(update={"stages": (priced,)}),)})


def errors_of(world: World, written: Program, ways: list[Lie]) -> list[Errors]:
    """One step for each way to lie against one device: the largest errors over all that this rank holds."""
    warnings.simplefilter("ignore")  # ops that chance has chosen may warn
    captured = captured_program(written)
    device = torch.device("cpu")
    with Communicator(rank=world.rank, world_size=world.world_size, device=device, timeout_s=20.0) as communicator:
        found = []
        for way in ways:
            graph, cluster = captured.graph, cluster_of(world.world_size)
            plan = plan_of(graph, way)
            module = Written(written).train()
            worker = Worker(
                module,
                lowered=lower(plan, graph, cluster),
                communicator=communicator,
                loss_count=captured.loss_count,
                optimizer=OptimizerSection(lr=1e-2),
                total_steps=1,
                seed=SEED,
                stage_programs=StageCutter(captured, module),
            )
            batch = written.batch(sum(way.sizes))
            alone = Case(module=Written(written).train(), graph=graph, batch=batch)
            # Of a part in which nothing is, there is no gradient.
            found.append(compared(world, worker, batch, alone, captured.loss_count, empty_parts=False)[0])
    return found


@settings(
    max_examples=GRAPHS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # to shrink what fails in processes takes too long
)
@given(seed=st.integers(0, 10**9))
def test_any_graph_in_parts_gives_the_gradients_of_one_device(pool: Pool, seed: int) -> None:
    written = program(seed)
    assume(written is not None)
    assert written is not None
    try:
        captured_program(written)
    except CaptureError:
        assume(False)
    ways = lies(captured_program(written).graph, Random(seed))
    assume(ways)
    require_exact(pool, written, ways)


def test_names_of_the_user_are_not_taken_for_those_of_ops(pool: Pool) -> None:
    """Weights and an input that are called as ops are, and an input and a buffer that share a name."""
    program = Program(
        seed=0,
        inputs=(Value("x", (5, 6)), Value("scale", (6,)), Value("add", (5, 6)), Value("labels", (5,), below=8)),
        parameters=(Value("t", (6, 4)), Value("linear", (8, 6)), Value("w", (7, 6))),
        buffers=(Value("scale", (6,)),),
        lines=(
            "x = x * scale[:, None] + add",
            "x = x + torch.relu(x @ t) @ t.t() * self.scale",
            "x = x + F.linear(x, w) @ w",
            "loss = F.cross_entropy((x @ linear.t()).flatten(0, 1), labels.flatten())",
        ),
    )
    require_exact(pool, program, lies(captured_program(program).graph, Random(0)))


def require_exact(pool: Pool, written: Program, ways: list[Lie]) -> None:
    """On devices that hold it in parts the gradients are those of one device."""
    graph = captured_program(written).graph
    for way in ways:
        sharding = shard_stage(graph, plan_of(graph, way).pipelines[0], 0)
        assert sharding is not None
        assert not inconsistencies(sharding, graph, stage_ops(graph, 0, len(graph.ops))), f"{way}\n{written}"
    errors = pool.run(len(ways[0].shares), errors_of, written, ways)
    for way, *of_ranks in zip(ways, *errors, strict=True):
        assert all(error <= BAR for of_rank in of_ranks for _, error in of_rank), f"{of_ranks}\n{way}\n{written}"


def _runs(lie: Lie, graph: ModelGraph) -> bool:
    """Not where nothing is in parts, nor where a TaskGraph is split over more devices than one of its ops can be cut for."""
    plan = plan_of(graph, lie)
    in_parts = any(stage.sharded for pipeline in plan.pipelines for stage in pipeline.stages)
    return in_parts and not violations(plan, graph, cluster_of(len(lie.shares)))
