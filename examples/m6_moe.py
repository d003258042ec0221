"""An M6-like mixture of experts over text and images: four lines make the plain model a hybrid.

Everything is replicated over the devices but the experts, which are split over the same devices: data and expert parallelism (Whale,
section 5.2.2). Each expert is on one device, faster ones have more of them. The four lines are marked with ``<--``.

    python examples/m6_moe.py [--experts 8] [--steps 20]
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workers import on_unequal_workers, run, world_size

import heterodyne as hd  # <--

SPEEDS = (0.7, 0.35, 0.35)
PATCHES, PATCH, TEXT, VOCABULARY = 9, 12, 16, 96


class Experts(nn.Module):
    """Top-2 gating with a capacity for each sample, as einsums (Lepikhin et al., "GShard", 2020); hidden [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int, inner: int, experts: int, capacity_factor: float) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)
        self.capacity_factor = capacity_factor

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.gate.out_features
        capacity = int(self.capacity_factor * 2 * hidden.shape[1] / experts) + 1
        probabilities = self.gate(hidden).softmax(-1)  # [B, T, E]
        weights, chosen = probabilities.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        picked = F.one_hot(chosen, experts).flatten(1, 2)  # [B, 2 T, E], token by token
        place = (picked.cumsum(1) - 1) * picked  # in the queue of its expert
        inside = picked * (place < capacity)
        slots = F.one_hot((place * inside).amax(-1), capacity) * inside.sum(-1, keepdim=True)  # [B, 2 T, K]
        routes = (inside.unsqueeze(-1) * slots.unsqueeze(-2)).unflatten(1, (-1, 2)).to(hidden.dtype)  # [B, T, 2, E, K]
        sent = torch.einsum("btjek,btm->ebkm", routes, hidden)
        worked = torch.einsum("ebkh,ehm->ebkm", F.gelu(torch.einsum("ebkm,emh->ebkh", sent, self.up)), self.down)
        returned = torch.einsum("btjek,ebkm->btjm", routes, worked)
        first = F.one_hot(chosen[..., 0], experts).to(hidden.dtype)
        balance = experts * (first.mean(1) * probabilities.mean(1)).sum(
            -1
        )  # [B]: near 1 where the experts are used alike
        return (returned * weights.unsqueeze(-1)).sum(2), balance


class Layer(nn.Module):
    """Attention, then experts, each behind a norm and a residual connection."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, 4 * width, experts, 1.25)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, width = hidden.shape
        split = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        with hd.split(world_size()):  # <--
            worked, balance = self.experts(self.norm2(hidden))  # <-- (indented)
        return hidden + worked, balance


class M6(nn.Module):
    """Patches [B, 9, 12] and the text [B, 16] under them -> the loss of the text."""

    def __init__(self, width: int, heads: int, layers: int, experts: int) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Linear(PATCH, width), nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(PATCHES + TEXT, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, heads, experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, patches: Tensor, text: Tensor) -> Tensor:
        hidden = torch.cat([self.patches(patches), self.tokens(text)], 1) + self.positions
        balance = torch.zeros(())
        for layer in self.layers:
            hidden, of_layer = layer(hidden)
            balance = balance + of_layer
        logits = self.head(self.norm(hidden[:, PATCHES - 1 : -1]))
        losses = F.cross_entropy(logits.transpose(1, 2), text, reduction="none").mean(1)
        return (losses + 0.01 * balance).mean()


def batch(step: int, size: int) -> dict[str, Tensor]:
    """Random patches, and a text that tells them: character j is about the mean of patch j mod 9; the same on every rank."""
    random = torch.Generator().manual_seed(step)
    patches = torch.randn(size, PATCHES, PATCH, generator=random)
    told = patches.mean(-1)[:, torch.arange(TEXT) % PATCHES]
    return {"patches": patches, "text": ((told * 40).round().long() + VOCABULARY // 2).clamp(0, VOCABULARY - 1)}


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--experts", type=int, default=8)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=12)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--measure", type=float, default=30.0, help="about the seconds that measuring may take")
    given = arguments.parse_args()
    on_unequal_workers(*SPEEDS)

    torch.manual_seed(0)
    hd.set_default_strategy(hd.replicate(world_size()))  # <--
    model = M6(given.width, 4, given.layers, given.experts)
    batches = functools.partial(batch, size=given.batch)
    optimizer = functools.partial(torch.optim.AdamW, lr=3e-3)
    with hd.distribute(
        model,
        batches(0),
        optimizer=optimizer,
        plan=hd.PlanOptions(micro_batch_sizes=(given.batch,), measure_s=given.measure),
        total_steps=given.steps,
    ) as trainer:
        run(trainer, batches, given.steps, lambda: f"experts on rank 0: {trainer.module.layers[0].experts.up.shape[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
