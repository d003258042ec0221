"""Look inside of a model that lies on several devices, and steer it, by the paths of its modules.

A GPT is trained as a pipeline of unequal workers. Beside it a vector is trained that is added to what one layer returns ("steering"): the
gradient that reaches it is that of one device, on every rank. Then the norms of what each layer returns are read, and what the model
predicts with and without the vector.

    python examples/looking_inside.py [--layers 4] [--steps 20]
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from gpt import build
from python_text import sequences
from torch import Tensor, nn
from workers import on_unequal_workers

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)


class Steering(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.vector


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--length", type=int, default=64)
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--measure", type=float, default=15.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    model = build(layers=given.layers, width=given.width, heads=4, length=given.length)
    batches = functools.partial(sequences, count=given.batch, length=given.length)
    steering = Steering(given.width)
    of_steering = torch.optim.SGD(steering.parameters(), lr=0.1)
    middle = f"layers.{given.layers // 2}"
    with hd.distribute(
        model,
        batches(0),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        plan=hd.PlanOptions("pipeline", measure_s=given.measure),
        total_steps=given.steps,
    ) as trainer:
        with trainer.edit({middle: steering}):
            for step in range(given.steps):
                result = trainer.step(batches(step))
                of_steering.step()
                of_steering.zero_grad()
                if trainer.rank == 0:
                    print(
                        f"step {step}: loss {result.loss:.4f}, |vector| {float(steering.vector.detach().norm()):.4f}",
                        flush=True,
                    )
            steered = trainer.evaluate(batches(given.steps))
        plain = trainer.evaluate(batches(given.steps))
        found = trainer.activations("layers.*", batches(given.steps))
    if trainer.rank == 0:
        print(f"evaluated: {plain:.4f}, steered at {middle} {steered:.4f}")
        for path, output in found.items():
            if path.count(".") == 1:  # "layers.*" names what is inside of them, too
                print(f"{path}: {list(output.shape)}, norm {float(output.norm()):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
