"""A pipeline of unequal workers that is flushed after each step, then one that is not: losses and samples/s side by side.

Without a flush some forwards run before the update of the step before, and read weights that are predicted. That is
inexact, so it is asked for by name.

    python examples/predicted_weights.py [--layers 4] [--steps 30]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import torch
from python_text import sequences
from transformers import LlamaConfig, LlamaForCausalLM
from workers import on_unequal_workers

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--length", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--measure", type=float, default=20.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    config = LlamaConfig(
        vocab_size=256, hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=given.length,
    )  # fmt: skip
    batches = functools.partial(sequences, count=given.batch, length=given.length)
    losses, rates, profile = [], [], None
    for asynchronous in (None, "predicted"):
        torch.manual_seed(0)
        sizes = tuple(size for size in (2, 4, 8) if 2 * size <= given.batch)
        plan = hd.PlanOptions(
            "pipeline",
            micro_batch_sizes=sizes,
            measure_s=given.measure,
            profile=profile,
            asynchronous=asynchronous,
        )
        optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
        with hd.distribute(
            LlamaForCausalLM(config), batches(0), optimizer=optimizer, plan=plan, total_steps=given.steps
        ) as trainer:
            if trainer.rank == 0:
                print(trainer.explain())
            started_s = time.perf_counter()
            results = [trainer.step(batches(step)) for step in range(given.steps)]
            losses.append([result.loss for result in results])  # only now: to read one makes the others wait
            rates.append(given.batch * given.steps / (time.perf_counter() - started_s))
            profile, first = trainer.profile, trainer.rank == 0
    if first:
        for step, (exact, predicted) in enumerate(zip(*losses, strict=True)):
            print(f"step {step}: loss {exact:.4f}, with predicted weights {predicted:.4f}")
        print("samples/s {:.1f}, with predicted weights {:.1f}".format(*rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
