"""A mixture of experts on unlike devices: placed by speed or in equal parts, tokens sent to their experts or gathered everywhere.

Emulated workers (CPU quotas) train a Hugging Face Mixtral, one way after the other in the same processes: its experts are split over the
workers and all else is replicated, each worker with samples by its speed. ``by speed`` places the experts by speed too, ``equal`` in
equal parts; in both a token travels to the experts that it has chosen. ``gathered`` places them by speed, and gives every worker all
tokens: the dense way, whose results are summed. The planner never chooses it for experts that are marked, so it is forced here.
Predictions are at the pace that the devices have beside the run (`pace`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from emulation import emulated, ratios, worker_arguments
from hand_made import Rig
from pace import Pace, run_in_turns
from results import Results, arguments, spread

from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.sharding.price import LATENCY_BYTES
from heterodyne.plan import sharded_stage
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Exchange, Layout, Pipeline, Plan, Region, Stage

if TYPE_CHECKING:
    import torch

BY_SPEED, EQUAL, GATHERED = "by speed", "equal", "gathered"
DEVICES = {"0.8 + 0.4": (0.8, 0.4), "0.8 + 0.4 + 0.4": (0.8, 0.4, 0.4)}
MARK = 2**31 - 1  # the largest that a plan takes
"""A price of latency by which a plan says here that tokens are to be gathered: no plan can ask for it, and none should."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """``steps`` of each way in each of the ``rounds``, of ``samples`` sequences of ``length`` tokens each, with ``choices`` of experts."""

    width: int
    inner: int
    experts: int
    layers: int
    samples: int
    length: int
    rounds: int
    steps: int
    budget_s: float
    choices: int = 2
    shares: tuple[int, ...] = ()
    """Of the devices, by their speeds."""


FULL = Size(width=256, inner=896, experts=12, layers=3, samples=12, length=64, rounds=8, steps=4, budget_s=45)
QUICK = Size(width=96, inner=256, experts=12, layers=2, samples=6, length=32, rounds=2, steps=2, budget_s=6)


def main() -> int:
    options = arguments(__doc__)
    results = Results("moe")
    size = QUICK if options.quick else FULL
    errors, gains = [], {}
    for name, speeds in DEVICES.items():
        of = replace(size, shares=tuple(round(10 * speed) for speed in speeds))
        job = emulated(speeds, [BY_SPEED, EQUAL, GATHERED], of, Path(__file__))
        tokens = size.samples * size.length
        for way in (BY_SPEED, EQUAL, GATHERED):
            predicted = job["predicted"][way]
            errors.append(predicted / median(job[way]) - 1)
            results.row(
                f"{name}: {way}",
                step_s=spread(job[way]),
                tokens_per_s=tokens / median(job[way]),
                predicted_s=predicted,
                error=errors[-1],
                experts=job["layout"][way],
            )
        for other in (EQUAL, GATHERED):
            found = ratios([job], other, BY_SPEED)
            results.row(f"{name}: {other} / {BY_SPEED}", step_ratio=spread(found))
            gains[name, other] = median(found)
    for (name, other), gain in gains.items():
        results.bar(f"experts by speed and tokens that travel over {other}, {name}", gain, ">= 1.0")
    results.bar("mean error of the predictions", sum(map(abs, errors)) / len(errors), "<= 0.07")
    return results.write(options.json)


def mixtral(size: Size) -> torch.nn.Module:
    """With its experts marked."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    import heterodyne as hd

    class Split(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module, devices: int) -> None:
            super().__init__()
            self.inner, self.devices = inner, devices

        def forward(self, *arguments: Any, **options: Any) -> Any:
            with hd.split(self.devices):
                return self.inner(*arguments, **options)

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=size.width, intermediate_size=size.inner, num_hidden_layers=size.layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=size.length, num_local_experts=size.experts,
        num_experts_per_tok=size.choices, tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts = Split(layer.mlp.experts, len(size.shares))
    return model


def gather_where_marked() -> None:
    """From here on, stages with that price do not send tokens to their experts."""
    problem_of = sharded_stage.problem_of

    def forced(graph: ModelGraph, stage: Stage, *more: Any) -> Any:
        problem, shares, fixed = problem_of(graph, stage, *more)
        if stage.exchange.latency_bytes == MARK:
            rows = frozenset((op.name, "n") for op in graph.ops if op.kind == "experts")
            usual = replace(problem.price, latency_bytes=LATENCY_BYTES)
            problem = replace(problem, forbidden=problem.forbidden | rows, price=usual)
        return problem, shares, fixed

    sharded_stage.problem_of = forced


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    gather_where_marked()
    with hd.open_session() as session:
        least = size.samples * min(size.shares) // sum(size.shares)
        rig = Rig.of(session, mixtral(size), batch, (least, size.samples), size.budget_s)
        plans = {way: rig.agreed(plan_of(rig, size, way)) for way in options.ways}
        pace = Pace(rig, mixtral(size), batch)
        workers = {way: rig.worker(plan, mixtral(size)) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        layout = {way: told(rig, plan) for way, plan in plans.items()}
        run_in_turns(rig, run, plans, pace, options.out, rounds=size.rounds, steps=size.steps, layout=layout)
        for made in workers.values():
            made.close()


def plan_of(rig: Rig, size: Size, way: str) -> Plan:
    graph, cluster = rig.captured.graph, rig.session.cluster
    shares = tuple(size.shares)
    of_experts = (1,) * len(shares) if way == EQUAL else shares
    marked = [
        Region(task_graph=task_graph.name, layout=Layout(kind="split", shares=of_experts))
        for task_graph in graph.task_graphs
    ]
    stage = Stage(
        ops=(0, len(graph.ops)),
        devices=tuple(device.id for device in cluster.devices),
        regions=(Region(layout=Layout(shares=shares)), *marked),
        exchange=Exchange(latency_bytes=MARK if way == GATHERED else LATENCY_BYTES),
    )
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=size.samples,
        pipelines=(Pipeline(micro_batches=MicroBatches((size.samples,)), stages=(stage,)),),
    )


def told(rig: Rig, plan: Plan) -> str:
    """How the experts were divided: how many each worker has, and whether tokens travel to them."""
    graph = rig.captured.graph
    sharding = sharded_stage.shard_stage(graph, plan.pipelines[0], 0)
    assert sharding is not None
    op = next(op for op in graph.ops if op.kind == "experts")
    strategy = sharding.strategies[op.name]
    matrices = next(
        (ref, layout)
        for ref, layout in zip(op.operands, strategy.operands, strict=True)
        if layout.kind == "shard" and graph.spec(ref).shape[0].is_constant
    )
    sizes = sharding.sizes(*matrices, plan.global_batch_size)
    return f"{' + '.join(map(str, sizes))}, {'tokens travel' if strategy.name == 'ne' else 'tokens are gathered'}"


if __name__ == "__main__":
    own = worker_arguments()
    sys.exit(main() if own is None else worker(own, Size(**own.size)))
