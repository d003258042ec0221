"""One long sequence over several devices: each has a slice of it, attention sees all that it may (context parallelism).

python examples/long_context.py [--length 1024] [--steps 5]
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from gpt import build
from python_text import sequences
from workers import on_unequal_workers, run

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--length", type=int, default=1024)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--measure", type=float, default=30.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    model = build(layers=given.layers, width=given.width, heads=4, length=given.length)
    batches = functools.partial(sequences, count=1, length=given.length)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    with hd.distribute(
        model,
        batches(0),
        optimizer=optimizer,
        plan=hd.PlanOptions("context", micro_batch_sizes=(1,), measure_s=given.measure),
    ) as trainer:
        run(trainer, batches, given.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
