"""A Hugging Face Llama, as it is, planned for the devices that there are: which weights are split, what is a stage, who takes how much.

python examples/llama_hybrid.py [--strategy auto|data|pipeline|split|context] [--steps 10]
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from workers import on_unequal_workers

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)


def text() -> Tensor:
    """Bytes of Python's own sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)


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
    corpus = text()

    def batch(step: int) -> dict[str, Tensor]:
        starts = torch.randint(
            len(corpus) - given.length, (given.batch,), generator=torch.Generator().manual_seed(step)
        )
        ids = torch.stack([corpus[start : start + given.length] for start in starts.tolist()])
        return {"input_ids": ids, "labels": ids}

    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    with hd.distribute(
        model,
        batch(0),
        optimizer=optimizer,
        plan=given.strategy,
        micro_batch_sizes=(1, 2, 4),
        measure_budget_s=given.measure,
    ) as trainer:
        if trainer.rank == 0:
            print(trainer.explain())
        for step in range(given.steps):
            result = trainer.step(batch(step))
            if trainer.rank == 0:
                print(f"step {step}: loss {result.loss:.4f}, {result.seconds:.3f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
