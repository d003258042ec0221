"""Law 1 for losses that add terms with denominators of their own, over plans of every kind."""

from __future__ import annotations

import pytest
import torch

from heterodyne.errors import DataError
from heterodyne.frontend import loss_of
from heterodyne.plan.check import violations
from multiprocess.exactness import Spread, require_exact
from multiprocess.models import COUPLED, TERMS, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, cluster_of, staged_plan, staged_worker


def spreads(ops: int) -> dict[str, Spread]:
    """Samples 0 and 1 are micro-batches of their own somewhere, so that a part counts nothing."""
    whole = (StageOf(ops, (0,), (1,)),), (StageOf(ops, (1,), (1,)),)
    cut = (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1,), (1,)))
    return {
        "data": Spread(2, "1F1B", (PipelineOf((1, 3), whole[0]), PipelineOf((2,), whole[1]))),
        "pipeline": Spread(2, "ZBH1", (PipelineOf((1, 2, 3), cut),)),
        "split": Spread(2, "1F1B", (PipelineOf((1, 3), (StageOf(ops, (0, 1), (2, 1), kind="split"),)),)),
        "context": Spread(2, "1F1B", (PipelineOf((1, 3), (StageOf(ops, (0, 1), (2, 1), kind="context"),)),)),
        "halves": Spread(2, "1F1B", (PipelineOf((3, 1), (StageOf(ops, (0, 1), (2, 1), kind="split", overlap=True),)),)),
        "mixed": Spread(3, "1F1B", (PipelineOf((1, 2), cut), PipelineOf((3,), (StageOf(ops, (2,), (1,)),)))),
    }


@pytest.mark.parametrize("name", TERMS)
def test_terms_with_denominators_of_their_own(pool: Pool, name: str) -> None:
    graph = captured(name)
    assert graph.loss.reduction == "terms"
    for spread in spreads(len(graph.ops)).values():
        require_exact(pool, name, spread)


def test_joined_inputs(pool: Pool) -> None:
    """Data parallel, and cut where the halves are still joined: a stage of one device has whole micro-batches."""
    kinds = spreads(len(captured("pairs").ops))
    for kind in ("data", "pipeline", "mixed"):
        require_exact(pool, "pairs", kinds[kind])


def evaluated(world: World, name: str) -> tuple[float, float]:
    """The loss of a batch in eval mode over two ranks, and by the module alone."""
    case = build(captured(name), 7)
    ops = len(case.graph.ops)
    cut = (PipelineOf((2, 5), (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1,), (1,)))),)
    alone = build(captured(name), 7)
    worker = staged_worker(world, case, cut, "1F1B")
    found = worker.evaluate(alone.batch)
    worker.close()
    with torch.no_grad():
        return found, float(loss_of(alone.module.eval()(**alone.batch)))


@pytest.mark.parametrize("name", TERMS)
def test_their_evaluation(pool: Pool, name: str) -> None:
    for found, expected in pool.run(2, evaluated, name):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_in_the_loss(pool: Pool, name: str) -> None:
    """Replicas exchange what the loss compares; each has all its samples in one micro-batch."""
    graph = captured(name)
    assert graph.loss.reduction == "coupled"
    ops = len(graph.ops)
    spread = Spread(
        3, "1F1B", tuple(PipelineOf((n,), (StageOf(ops, (rank,), (1,)),)) for rank, n in enumerate((3, 1, 4)))
    )
    within = Spread(3, "1F1B", (PipelineOf((6,), (StageOf(ops, (2, 0), (2, 1)),)),))
    for each in (spread, within):
        require_exact(pool, name, each)


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_over_micro_batches_and_stages(pool: Pool, name: str) -> None:
    """The loss is computed once, behind the last forward: of one replica, of replicas that are cut differently, of devices that share."""
    graph = captured(name)
    ops, whole = len(graph.ops), graph.together_from
    assert whole is not None
    several = PipelineOf((2, 1, 2), (StageOf(ops, (0,), (1,)),))
    cut = PipelineOf((1, 2), (StageOf(whole // 2, (1,), (1,)), StageOf(ops, (2,), (1,))))
    late = PipelineOf((2, 2), (StageOf(whole // 2, (0,), (1,)), StageOf(whole, (1,), (1,)), StageOf(ops, (2,), (1,))))
    shared = PipelineOf((4, 3), (StageOf(whole // 2, (0,), (1,)), StageOf(ops, (1, 2), (1, 2))))
    joined = name == "similar"  # what crosses has samples of two views, one after the other
    for pipelines in ((several,), (several, cut), (late,), *(() if joined else ((shared,),))):
        require_exact(pool, name, Spread(3, "GPipe", pipelines))


@pytest.mark.parametrize("name", ["contrastive", "router"])
def test_they_see_each_other_where_stages_recompute_keep_on_hosts_and_split_their_backward(
    pool: Pool, name: str
) -> None:
    graph = captured(name)
    ops, cut = len(graph.ops), graph.blocks[len(graph.blocks) // 2].start or graph.together_from or 1
    whole = [[b.index for b in graph.blocks if a <= b.start and b.stop <= z] for a, z in ((0, cut), (cut, ops))]
    order = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1F1 1I1 1I0 1W0 1W1")
    for ways in (("recompute", "hosted"), ("hosted", "recompute")):
        stages = tuple(
            StageOf(stop, (rank,), (1,), **{way: tuple(blocks)})  # type: ignore[arg-type]  # one of the two
            for rank, (stop, blocks, way) in enumerate(zip((cut, ops), whole, ways, strict=True))
        )
        require_exact(pool, name, Spread(2, "1F1B", (PipelineOf((2, 3), stages, order),)))


def evaluated_together(world: World, name: str, samples: int, cut: bool) -> tuple[float, float]:
    """The loss of a batch of some size in eval mode over three replicas or stages, and by the module alone."""
    case, alone = build(captured(name), samples), build(captured(name), samples)
    ops = len(case.graph.ops)
    plan = tuple(PipelineOf((n,), (StageOf(ops, (rank,), (1,)),)) for rank, n in enumerate((2, 1, 2)))
    if cut:
        last = case.graph.together_from or 0
        stages = (StageOf(last // 2, (0,), (1,)), StageOf(last, (1,), (1,)), StageOf(ops, (2,), (1,)))
        plan = (PipelineOf((2, 2), stages, tuple(f"{n}F0 {n}F1 {n}B0 {n}B1" for n in range(3))),)
    worker = staged_worker(world, case, plan, "1F1B")
    found = worker.evaluate(alone.batch)
    worker.close()
    with torch.no_grad():
        return found, float(loss_of(alone.module.eval()(**alone.batch)))


@pytest.mark.parametrize(("samples", "cut"), [(2, False), (5, False), (9, False), (1, True), (5, True)])
def test_evaluation_of_samples_that_see_each_other(pool: Pool, samples: int, cut: bool) -> None:
    for found, expected in pool.run(3, evaluated_together, "contrastive", samples, cut):
        assert found == pytest.approx(expected, rel=1e-5)


def test_plans_that_would_compare_fewer_samples_are_refused(pool: Pool) -> None:
    graph = captured("contrastive")
    ops = len(graph.ops)
    cut = (PipelineOf((2,), (StageOf(ops - 1, (0,), (1,)), StageOf(ops, (1,), (1,)))),)
    several = (PipelineOf((2, 1), (StageOf(ops, (0,), (1,)),)), PipelineOf((2,), (StageOf(ops, (1,), (1,)),)))
    said_of = ((cut, "the loss compares the samples"), (several, "before all its forwards, and samples see each other"))
    for pipelines, said in said_of:
        broken = violations(staged_plan(graph, cluster_of(2), pipelines, "1F1B"), graph, cluster_of(2))
        assert any(said in fault for fault in broken)


def goes_on(world: World, name: str) -> tuple[str, float, float]:
    """What is said of a batch in which nothing counts; and the losses of the next one, with and without it before."""
    case = build(captured(name), 7)
    ops = len(case.graph.ops)
    cut = (PipelineOf((2, 3, 2), (StageOf(ops // 2, (0,), (1,)), StageOf(ops, (1,), (1,)))),)
    worker = staged_worker(world, case, cut, "1F1B")
    undisturbed = worker.gradients(case.batch)[0]
    with pytest.raises(DataError) as caught:
        worker.step({**case.batch, "labels": torch.full_like(case.batch["labels"], -100)})
    found = worker.gradients(case.batch)[0]
    worker.close()
    return str(caught.value), undisturbed, found


def test_a_batch_in_which_nothing_counts_leaves_every_rank_able_to_go_on(pool: Pool) -> None:
    for said, undisturbed, found in pool.run(2, goes_on, "gpt2", timeout_s=20):
        assert "no sample of the global batch has a label that the loss counts" in said
        assert found == undisturbed
