"""Asynchronous steps with predicted weights, against one process that does the same by the definition."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import heterodyne as hd
from heterodyne.errors import DataError, NumericsError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import OptimizerSection
from heterodyne.plan.plan import Plan
from heterodyne.runtime.exact.verify import compare
from heterodyne.runtime.weights.optimizer import learning_rate
from multiprocess.exactness import SEED, TOTAL_STEPS
from multiprocess.models import Case, build, captured
from multiprocess.pool import Pool, World
from multiprocess.test_own_loop import Labelled, adamw, loss_of, plans, session_of
from multiprocess.test_own_loop import batch_of as loop_batch
from multiprocess.test_own_loop import graph as loop_graph
from multiprocess.work import PipelineOf, StageOf, copied, staged_worker
from pure.build import linear, profile

ADAMW = OptimizerSection(lr=1e-2, eps=1e-3, warmup_steps=2)
SGD = OptimizerSection(name="sgd", lr=5e-2, momentum=0.8)
STEPS = 7
Cut = tuple[tuple[float, int], ...]
"""For each stage the part of the ops at which it ends, and its rank."""


def pipeline_of(graph: ModelGraph, sizes: Sequence[int], cut: Cut, **more: Any) -> PipelineOf:
    stages = tuple(StageOf(round(part * len(graph.ops)), (rank,), (1,)) for part, rank in cut)
    return PipelineOf(tuple(sizes), stages, **more)


def batch_of(case: Case, step: int) -> dict[str, Tensor]:
    """Others in each step, with unequal numbers of labels that count."""
    batch = {name: tensor.roll(step, 0).clone() for name, tensor in case.batch.items()}
    for sample in range(0, len(batch["labels"]), 2):
        batch["labels"][sample, 1 : 2 + sample % 4] = -100
    return batch


Life = Literal["plain", "recompute", "resumed", "own rate", "back", "frozen late"]


def train(
    world: World, graph: ModelGraph, pipeline: PipelineOf, section: OptimizerSection, ends: Sequence[int], life: Life
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and what the model has become. After the steps of ``ends`` it is evaluated, or another worker goes on with its state."""
    case = build(graph, sum(pipeline.sizes))
    if life == "recompute":
        whole = [
            tuple(n for n, b in enumerate(graph.blocks) if start <= b.start < b.stop <= stage.stop)
            for start, stage in zip([0, *(s.stop for s in pipeline.stages)], pipeline.stages, strict=False)
        ]
        stages = [replace(s, recompute=again) for s, again in zip(pipeline.stages, whole, strict=True)]
        pipeline = replace(pipeline, stages=tuple(stages))
    optimizer: Any = section
    if life == "own rate":
        optimizer = partial(torch.optim.SGD, lr=section.lr, momentum=section.momentum)
    worker = staged_worker(world, case, (pipeline,), "Async1F1B", optimizer=optimizer, seed=SEED)
    scheduler = LambdaLR(worker.optimizer, lambda step: learning_rate(section, step, TOTAL_STEPS) / section.lr)
    results = []
    for step in range(STEPS):
        results.append(worker.step(batch_of(case, step)))
        if life == "own rate":
            scheduler.step()
            for group in worker.optimizer.param_groups:
                group["weight_decay"] = 0.1 * (step + 1)
        if step in ends and life == "resumed":
            state = deepcopy(worker.state.state_dict())
            worker.close()
            case = build(graph, sum(pipeline.sizes))
            worker = staged_worker(world, case, (pipeline,), "Async1F1B", optimizer=optimizer, seed=SEED)
            worker.state.load_state_dict(state)
        elif step in ends and life == "back":
            state = deepcopy(worker.state.state_dict())
            for _ in range(2):
                worker.step(batch_of(case, 9))
            worker.state.load_state_dict(state)
        elif step in ends and life == "frozen late":
            for parameter in worker.module.parameters():
                parameter.requires_grad_(False)
            worker.evaluate(case.batch)
            for parameter in worker.module.parameters():
                parameter.requires_grad_(True)
        elif step in ends:
            assert worker.evaluate(case.batch) > 0
    state = copied(worker.state.state_dict()["model"])
    worker.close()
    return [result.loss for result in results], state


def by_definition(
    graph: ModelGraph, pipeline: PipelineOf, section: OptimizerSection, ends: Sequence[int], life: Life
) -> tuple[list[float], dict[str, Tensor]]:
    """In one process: a forward of micro-batch j on place k reads predicted weights where j < depth k, of a step that follows another one
    at once: those that the update of that one would make if its last ``depth`` micro-batches had the mean gradient of the others."""
    case = build(graph, sum(pipeline.sizes))
    starts = [0, *(stage.stop for stage in pipeline.stages)]
    stage_of = {}
    for number, op in enumerate(graph.ops):
        for name in op.parameters:
            stage_of.setdefault(name, sum(number >= start for start in starts[1:]))
    places = len(pipeline.stages)
    depth = {
        name: min(len(pipeline.sizes), places - stage_of.get(name, 0)) - 1
        for name in (p.name for p in graph.parameters)
    }
    weights = {n: p.detach().clone() for n, p in case.module.named_parameters() if p.requires_grad}
    matrices = {n for n, p in weights.items() if p.dim() > 1 and "norm" not in n}
    moments = {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in weights.items()}

    def updated(name: str, gradient: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The weight and its moments after the update of a step, counted from 0."""
        w, (m, v), rate = weights[name], moments[name], learning_rate(section, step, TOTAL_STEPS)
        decay = 0.1 * step if life == "own rate" else section.weight_decay * (name in matrices)
        if section.name == "sgd":
            m = section.momentum * m + gradient + decay * w
            return w - rate * m, (m, v)
        b1, b2 = section.betas
        m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient**2
        by = (m / (1 - b1 ** (step + 1))) / ((v / (1 - b2 ** (step + 1))).sqrt() + section.eps)
        return w * (1 - rate * decay) - rate * by, (m, v)

    losses, predicted, samples = [], weights, sum(pipeline.sizes)
    for step in range(STEPS):
        flushed = step == 0 or step - 1 in ends
        batch, buffers = batch_of(case, step), dict(case.module.named_buffers())
        cuts = [(sum(pipeline.sizes[:j]), size) for j, size in enumerate(pipeline.sizes)]
        parts = [{n: t[at : at + size] for n, t in batch.items()} for at, size in cuts]
        counted = [case.count.statistics(part, size, buffers) for part, (_, size) in zip(parts, cuts, strict=True)]
        whole = torch.stack(counted).sum(0)
        gradients: dict[str, Tensor] = {}
        early: dict[str, Tensor] = {}
        total = 0.0
        for j, (part, statistics) in enumerate(zip(parts, counted, strict=True)):
            read = {
                n: (w if flushed or j >= depth[n] else predicted[n]).clone().requires_grad_()
                for n, w in weights.items()
            }
            out = torch.func.functional_call(case.module, read, kwargs=part)
            loss = (out["loss"] if isinstance(out, dict) else out) * case.count.weight(statistics, whole)
            for n, g in zip(read, torch.autograd.grad(loss, list(read.values()), allow_unused=True), strict=True):
                if g is not None:
                    gradients[n] = gradients.get(n, 0) + g
                    there = len(parts) - depth[n]
                    if j < there:
                        early[n] = early.get(n, 0) + g * samples / sum(pipeline.sizes[:there])
            total += loss.item()
        losses.append(total)
        predicted = {n: updated(n, early[n], step)[0] if n in early else w for n, w in weights.items()}
        after = {n: updated(n, g, step) for n, g in gradients.items()}
        weights = {n: after[n][0] if n in after else w for n, w in weights.items()}
        moments = {n: after[n][1] if n in after else of for n, of in moments.items()}
    return losses, weights


THREE: Cut = ((0.3, 2), (0.75, 0), (1.0, 1))


@pytest.mark.parametrize(
    ("sizes", "section", "ends", "life"),
    [
        ((2, 1, 2, 1, 2), ADAMW, (), "plain"),
        ((1, 2, 1), ADAMW, (2, 4), "recompute"),
        ((2, 2, 1, 1), SGD, (3,), "plain"),
        ((3, 1), ADAMW, (3,), "resumed"),
        ((1, 2, 1), ADAMW, (1, 4), "back"),
        ((2, 1, 1), ADAMW, (1, 3), "frozen late"),
        ((2, 1, 2), SGD.model_copy(update={"weight_decay": 0.0}), (), "own rate"),
    ],
)
def test_steps_are_those_of_the_definition(
    pool: Pool, sizes: tuple[int, ...], section: OptimizerSection, ends: tuple[int, ...], life: Life
) -> None:
    graph = captured("llama")
    pipeline = pipeline_of(graph, sizes, THREE)
    expected_losses, expected = by_definition(graph, pipeline, section, ends, life)
    for losses, state in pool.run(4, train, graph, pipeline, section, ends, life):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        assert compare(0.0, state, 0.0, {**state, **expected}).largest <= 1e-4


def refused(world: World, graph: ModelGraph, pipeline: PipelineOf, **more: Any) -> str:
    with pytest.raises(PlanError) as told:
        staged_worker(world, build(graph, sum(pipeline.sizes)), (pipeline,), "Async1F1B", **more)
    return str(told.value)


def refused_with_sgd(world: World, graph: ModelGraph, pipeline: PipelineOf) -> str:
    return refused(world, graph, pipeline, optimizer=partial(torch.optim.SGD, lr=0.1))


def refused_with_clipping(world: World, graph: ModelGraph, pipeline: PipelineOf) -> str:
    return refused(world, graph, pipeline, clip=0.5)


@pytest.mark.parametrize(
    ("name", "start", "says"),
    [
        ("gpt2", refused, "put tied weights into one stage"),
        ("resnet", refused, "mixes the samples of a micro-batch"),
        ("llama", refused_with_sgd, "weights are not predicted for SGD without momentum"),
        ("llama", refused_with_clipping, "write training.clip_grad_norm: 0"),
    ],
)
def test_what_cannot_be_predicted_is_refused_on_every_rank(pool: Pool, name: str, start: Any, says: str) -> None:
    graph = captured(name)
    for told in pool.run(3, start, graph, pipeline_of(graph, (2, 2, 2), THREE)):
        assert says in told


def spoiled(world: World, graph: ModelGraph, pipeline: PipelineOf, how: str) -> tuple[str, str]:
    case = build(graph, sum(pipeline.sizes))
    worker = staged_worker(world, case, (pipeline,), "Async1F1B", optimizer=ADAMW, seed=SEED)
    worker.step(case.batch)
    bad = dict(case.batch)
    if how == "nothing counts":
        bad["labels"] = torch.full_like(bad["labels"], -100)
    else:
        with worker.state.lent():
            for parameter in (p for p in case.module.parameters() if not p.is_meta):
                parameter.data.fill_(float("nan"))

    def go_on() -> None:
        worker.step(bad)
        worker.step(case.batch)

    with pytest.raises((DataError, NumericsError)) as told:
        go_on()
    return type(told.value).__name__, str(told.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("nothing counts", "no sample of the global batch"),
        ("not finite", "the update by it is made before that is known"),
    ],
)
def test_a_step_that_cannot_be_made_ends_on_every_rank(pool: Pool, how: str, says: str) -> None:
    graph = captured("llama")
    for _, told in pool.run(3, spoiled, graph, pipeline_of(graph, (2, 2, 2), THREE), how):
        assert says in told


def in_a_loop(world: World, found: ModelGraph, plan: Plan) -> tuple[str, str, str]:
    """What is said of the plan where nobody has asked for it, of an edit that trains something, and of an average of the weights."""

    def distributed(asked: Literal["predicted"] | None) -> hd.Distributed:
        here = session_of(world)
        known = profile(found, here.cluster, [linear(1e-3)] * world.world_size, reduce=lambda _: 1e-6)
        options = hd.PlanOptions(plan, profile=known, check_s=0, asynchronous=asked)
        return hd.distribute(
            Labelled(), loop_batch(6), loss=loss_of, optimizer=adamw, plan=options, session=here, clip_grad_norm=0.0
        )

    with pytest.raises(PlanError) as unasked:
        distributed(None)
    trained = torch.nn.Parameter(torch.zeros(8))
    with distributed("predicted") as trainer:
        trainer.step(loop_batch(6))
        with (
            pytest.raises(PlanError) as edited,
            trainer.edit({"layers.3": lambda hidden: hidden + trained}),
        ):
            pass
        with pytest.raises(PlanError) as averaged:
            trainer.average(0.9)
    return str(unasked.value), str(edited.value), str(averaged.value)


def test_a_loop_is_told_what_does_not_go_with_predicted_weights(pool: Pool) -> None:
    plan = plans()["1F1B"].model_copy(update={"schedule": "Async1F1B"})
    for unasked, edited, averaged in pool.run(3, in_a_loop, loop_graph(), plan):
        assert "the job does not ask for that" in unasked
        assert "'layers.3' trains something" in edited
        assert "no average of the weights is kept" in averaged
