"""Attention on some workers, experts on another one: a Hugging Face Mixtral as it is, under a plan of one's own.

A model with mixtures of experts is cut in blocks before and behind each of them, so a plan can put the experts elsewhere. All experts are
on the last worker here; what is between them, for half of the samples, on each of the others. The loss balances the experts, over the
whole batch. `strategy: auto` weighs such plans too, with who does what found by measuring.

    python examples/experts_apart.py [--layers 2] [--steps 10]
"""

from __future__ import annotations

import argparse
import functools
import sys
from itertools import pairwise

import torch
from python_text import sequences
from transformers import MixtralConfig, MixtralForCausalLM
from workers import on_unequal_workers, run, world_size

import heterodyne as hd
from heterodyne.plan.plan import Group, Layout, Pipeline, Region, Stage

SPEEDS = (0.4, 0.4, 0.6)


def experts_apart(layers: int, batch: int, micro_batches: int) -> hd.Plan:
    """The blocks are the embedding, three a layer (attention, experts, what adds them), and the head."""
    borders = [0, *(border for layer in range(layers) for border in (3 * layer + 2, 3 * layer + 3)), 3 * layers + 2]
    groups = [Group(kind="cpu", devices=devices, place=place) for place, devices in enumerate((world_size() - 1, 1))]
    stages = tuple(
        Stage(blocks=blocks, group=group, regions=(Region(layout=Layout(shares=(1,) * group.devices)),))
        for blocks, group in zip(pairwise(borders), groups * (layers + 1), strict=False)
    )
    pipeline = Pipeline(micro_batches=f"{micro_batches}x{batch // micro_batches}", stages=stages)
    return hd.Plan(global_batch_size=batch, schedule="GPipe", pipelines=(pipeline,))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--measure", type=float, default=30.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, num_local_experts=8,
        output_router_logits=True,
    )  # fmt: skip
    batches = functools.partial(sequences, count=given.batch, length=64)
    with hd.distribute(
        MixtralForCausalLM(config),
        batches(0),
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        plan=hd.PlanOptions(experts_apart(given.layers, given.batch, 2), measure_s=given.measure),
    ) as trainer:
        run(trainer, batches, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
