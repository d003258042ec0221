"""Layers split over unequal devices: widths by speed against equal widths; and over equal devices, ours against PyTorch's DTensor.

Emulated workers (CPU quotas of a core) train a Llama whose weights are split over all of them, one way after the other in the same
processes, so that a machine that gets slower does so for all. ``by speed`` cuts heads, feed-forward columns and vocabulary in
proportion to the speeds, ``equal`` in equal parts, both on our runtime; ``DTensor`` is `torch.distributed.tensor.parallel` on the same
layers, in the plan of PyTorch's own tutorial (columns, then rows; vocabulary of embedding and head), with the same optimizer, and
without clipping, which ours does: torch's own refuses where some parameters are split and others are not. Predictions are at the pace
that the devices have beside the run (`pace`).
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

from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Exchange, Layout, Pipeline, Plan, Region, Stage

if TYPE_CHECKING:
    import torch

BY_SPEED, EVEN, TORCH = "by speed", "equal", "DTensor"
DEVICES = {"0.8 + 0.4": (0.8, 0.4), "0.8 + 0.4 + 0.4": (0.8, 0.4, 0.4)}
ALIKE = (0.8, 0.8)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained: ``steps`` of each way in each of the ``rounds``, of ``samples`` each."""

    width: int
    layers: int
    heads: int
    samples: int
    length: int
    rounds: int
    steps: int
    budget_s: float
    shares: tuple[int, ...] = ()
    """Of the devices, by their speeds."""


FULL = Size(width=384, layers=4, heads=12, samples=8, length=128, rounds=8, steps=2, budget_s=45)
QUICK = Size(width=192, layers=2, heads=12, samples=4, length=64, rounds=2, steps=2, budget_s=6)


def main() -> int:
    options = arguments(__doc__)
    results = Results("uneven_tensor_parallel")
    size = QUICK if options.quick else FULL
    gains = {}
    for name, speeds in DEVICES.items():
        job = emulated(speeds, [BY_SPEED, EVEN], by_speed(size, speeds), Path(__file__))
        report(results, name, job)
        gains[name] = ratios([job], EVEN, BY_SPEED)
        results.row(f"{name}: {EVEN} / {BY_SPEED}", step_ratio=spread(gains[name]))
    job = emulated(ALIKE, [EVEN, TORCH], by_speed(size, ALIKE), Path(__file__))
    report(results, "equal devices", job)
    level = ratios([job], TORCH, EVEN)
    results.row(f"equal devices: {TORCH} / ours", step_ratio=spread(level))
    errors = [abs(row["error"]) for row in results.rows if "error" in row]
    results.bar("mean error of the predictions", sum(errors) / len(errors), "<= 0.07")
    for name, ratio in gains.items():
        results.bar(f"widths by speed over equal widths, {name}", median(ratio), ">= 1.2")
    results.bar("speed-up over DTensor, equal devices", median(level), ">= 1.0")
    return results.write(options.json)


def by_speed(size: Size, speeds: tuple[float, ...]) -> Size:
    return replace(size, shares=tuple(round(10 * speed) for speed in speeds))


def report(results: Results, devices: str, job: dict[str, Any]) -> None:
    for way in (BY_SPEED, EVEN, TORCH):
        if way in job:
            predicted = job["predicted"].get(way)
            told = {} if predicted is None else {"predicted_s": predicted, "error": predicted / median(job[way]) - 1}
            results.row(f"{devices}: {way}", step_s=spread(job[way]), **told)


def llama(size: Size) -> torch.nn.Module:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=size.width, intermediate_size=4 * size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=size.length,
        tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def worker(options: argparse.Namespace, size: Size) -> None:
    import torch

    import heterodyne as hd

    tokens = torch.randint(0, 256, (size.samples, size.length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    with hd.open_session() as session:
        rig = Rig.of(session, llama(size), batch, (size.samples,), size.budget_s)
        shares = {BY_SPEED: tuple(size.shares), EVEN: (1,) * len(size.shares)}
        plans = {way: rig.agreed(split(rig, of, size)) for way, of in shares.items() if way in options.ways}
        pace = Pace(rig, llama(size), batch)
        workers = {way: rig.worker(plan, llama(size)) for way, plan in plans.items()}
        run: dict[str, Callable[[], object]] = {way: (lambda w=w: w.step(batch)) for way, w in workers.items()}
        if TORCH in options.ways:
            run[TORCH] = dtensor(llama(size), tokens, session.world_size)
        turns = {way: run[way] for way in options.ways}
        run_in_turns(rig, turns, plans, pace, options.out, rounds=size.rounds, steps=size.steps)
        for made in workers.values():
            made.close()


def split(rig: Rig, shares: tuple[int, ...], size: Size, *, overlap: bool = False) -> Plan:
    """The whole model on all devices, split by these shares."""
    graph, cluster = rig.captured.graph, rig.session.cluster
    stage = Stage(
        ops=(0, len(graph.ops)),
        devices=tuple(device.id for device in cluster.devices),
        regions=(Region(layout=Layout(kind="split", shares=shares)),),
        exchange=Exchange(),
        overlap=overlap,
    )
    return Plan(
        model=graph.fingerprint,
        cluster=cluster.fingerprint,
        global_batch_size=size.samples,
        pipelines=(Pipeline(micro_batches=MicroBatches((size.samples,)), stages=(stage,)),),
    )


def dtensor(model: torch.nn.Module, tokens: torch.Tensor, ranks: int) -> Callable[[], object]:
    """A step of PyTorch's tensor parallelism."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    of_layer = {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    own = worker_arguments()
    if own is None:
        sys.exit(main())
    worker(own, Size(**own.size))
