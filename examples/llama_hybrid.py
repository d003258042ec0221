"""A Hugging Face Llama, as it is, planned for the devices that there are: which weights are split, what is a stage, who takes how much.

python examples/llama_hybrid.py [--strategy auto|data|pipeline|split|context] [--steps 10]
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from python_text import sequences
from transformers import LlamaConfig, LlamaForCausalLM
from workers import on_unequal_workers, run

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--strategy", default="auto")
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=128)
    arguments.add_argument("--length", type=int, default=128)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--measure", type=float, default=30.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=given.width, intermediate_size=3 * given.width, num_hidden_layers=given.layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=given.length,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    batches = functools.partial(sequences, count=given.batch, length=given.length)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    with hd.distribute(
        model,
        batches(0),
        optimizer=optimizer,
        plan=hd.PlanOptions(given.strategy, micro_batch_sizes=(1, 2, 4), measure_s=given.measure),
        total_steps=given.steps,
    ) as trainer:
        run(trainer, batches, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
