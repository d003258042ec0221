"""A classifier with 100,000 classes: the backbone is replicated, the head is split.

With so many classes nearly all weights are in the last layer. Replicated, its gradients would have to be summed over all devices in
each step; split, each device keeps its own classes, as many as its speed allows, and what travels is a few features a sample and
a few numbers of the loss (Whale, section 5.2.1). It takes the two ``with`` lines in `Classifier.forward`.

    python examples/classify_100k.py [--classes 100000] [--steps 20]
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workers import on_unequal_workers, run, world_size

import heterodyne as hd

SPEEDS = (0.7, 0.35, 0.35)
BITS = 17


class Classifier(nn.Module):
    """Images [B, 1, 8, 17 * 2] -> the loss of their classes."""

    def __init__(self, classes: int, width: int, devices: int) -> None:
        super().__init__()
        self.devices = devices
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 4 * BITS, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        with hd.replicate(self.devices):
            features = self.backbone(images)
        with hd.split(self.devices):
            return F.cross_entropy(self.head(features), labels)


def batch(step: int, size: int, classes: int) -> dict[str, Tensor]:
    """Images that show the bits of their class as stripes, under noise; few classes are common and most are rare, as in life.

    The same on every rank.
    """
    random = torch.Generator().manual_seed(step)
    labels = (classes ** torch.rand(size, generator=random)).long().clamp(max=classes - 1)
    bits = (labels[:, None] >> torch.arange(BITS)) & 1
    stripes = bits.float().repeat_interleave(2, 1)[:, None, None, :].expand(-1, 1, 8, -1)
    return {"images": stripes + 0.3 * torch.randn(stripes.shape, generator=random), "labels": labels}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--classes", type=int, default=100_000)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--measure", type=float, default=30.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    model = Classifier(given.classes, given.width, world_size())
    batches = functools.partial(batch, size=given.batch, classes=given.classes)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    with hd.distribute(
        model,
        batches(0),
        optimizer=optimizer,
        plan=hd.PlanOptions(micro_batch_sizes=(given.batch,), measure_s=given.measure),
        total_steps=given.steps,
    ) as trainer:
        run(trainer, batches, given.steps, lambda: f"classes on rank 0: {trainer.module.head.weight.shape[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
