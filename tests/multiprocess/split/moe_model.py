"""A small GPT with mixtures of experts, in plain PyTorch, as a user writes it: it knows nothing of devices.

The experts come in two forms. `EinsumExperts` is that of GShard and M6: masks send the tokens to places of a fixed number, the capacity, by
matrix products. `IndexedExperts` drops nothing: it takes for each choice the weights of its expert (``F.grouped_mm`` would take less
memory, but PyTorch 2.13 traces it in bfloat16 alone). In both each sample is a group of its own, for the capacity and for the loss
that balances the router, so no sample depends on the others.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EinsumExperts(nn.Module):
    """GShard's layer: hidden [G, S, M] -> the same, and the balance loss. G samples of S tokens, E experts, C places in each."""

    def __init__(self, width: int, inner: int, experts: int, k: int, factor: float) -> None:
        super().__init__()
        self.experts, self.k, self.factor = experts, k, factor
        self.router = nn.Linear(width, experts, bias=False)
        self.inwards = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.outwards = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        length = hidden.shape[1]
        capacity = math.ceil(self.k * length * self.factor / self.experts)
        probabilities = self.router(hidden).softmax(-1)  # [G, S, E]
        weights, chosen = probabilities.topk(self.k, dim=-1)  # [G, S, k]
        weights = weights / weights.sum(-1, keepdim=True)
        masks = F.one_hot(chosen, self.experts)  # [G, S, k, E]
        # All first choices come before the second ones.
        queue = masks.transpose(1, 2).flatten(1, 2)  # [G, k * S, E]
        places = ((queue.cumsum(1) - queue) * queue).sum(-1).unflatten(1, (self.k, length)).transpose(1, 2)  # [G, S, k]
        # One place more, for those that come too late; it is cut off.
        taken = F.one_hot(places.clamp(max=capacity), capacity + 1)[..., :capacity]  # [G, S, k, C]
        dispatch = torch.einsum("gske,gskc->gsec", masks.to(hidden.dtype), taken.to(hidden.dtype))
        combine = torch.einsum("gske,gskc->gsec", masks * weights.unsqueeze(-1), taken.to(hidden.dtype))
        arrived = torch.einsum("gsec,gsm->egcm", dispatch, hidden)
        made = torch.einsum("egcm,emh->egch", arrived, self.inwards)
        made = torch.einsum("egch,ehm->egcm", F.gelu(made), self.outwards)
        return torch.einsum("gsec,egcm->gsm", combine, made), _balance(probabilities, masks[:, :, 0])


class IndexedExperts(nn.Module):
    """The same for SwiGLU experts without a capacity. Weights as Transformers keeps them: [E, 2 I, M] and [E, M, I]."""

    def __init__(self, width: int, inner: int, experts: int, k: int) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, inner) / inner**0.5)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(hidden).softmax(-1)
        weights, chosen = probabilities.topk(self.k, dim=-1)  # [G, S, k]
        weights = weights / weights.sum(-1, keepdim=True)
        made = self.gate_up[chosen] @ hidden[:, :, None, :, None]  # [G, S, k, 2 I, 1]
        gate, up = made.chunk(2, dim=-2)
        made = (self.down[chosen] @ (F.silu(gate) * up)).squeeze(-1)  # [G, S, k, M]
        first = F.one_hot(chosen[..., 0], self.experts)
        return (made * weights.unsqueeze(-1)).sum(2), _balance(probabilities, first)


def _balance(probabilities: Tensor, first: Tensor) -> Tensor:
    """The Switch loss of each sample, averaged: E * sum_e f_e P_e over its own tokens. Both arguments [G, S, E]."""
    fractions = first.to(probabilities.dtype).mean(1)
    return (fractions * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]


class Layer(nn.Module):
    """Attention and a mixture of experts, each behind a norm and a residual connection."""

    def __init__(self, width: int, heads: int, experts: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mixture = experts

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        samples, length, width = hidden.shape
        split = self.qkv(self.norm_1(hidden)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        added, balance = self.mixture(self.norm_2(hidden))
        return hidden + added, balance


class MoeGPT(nn.Module):
    """Token ids [B, T] and labels [B, T] -> the mean loss over all tokens, and the balance losses of its layers.

    All labels count: were some ignored, the two would be means over different numbers, which no weights of parts of a batch can serve.
    """

    def __init__(self, layers: list[Layer], vocabulary: int, length: int, width: int, balance: float) -> None:
        super().__init__()
        self.balance = balance
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        balances = []
        for layer in self.layers:
            hidden, balance = layer(hidden)
            balances.append(balance)
        losses = F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten(), reduction="none")
        if not self.balance:
            return losses.mean()
        return losses.mean() + self.balance * torch.stack(balances).sum()


def build(
    form: Literal["einsum", "indexed"] = "einsum",
    *,
    vocabulary: int = 23,
    length: int = 8,
    width: int = 16,
    inner: int = 24,
    heads: int = 2,
    layers: int = 2,
    experts: int = 4,
    k: int = 2,
    factor: float = 1.25,
    balance: float = 0.01,
) -> MoeGPT:
    """A model of that size. ``factor``: of the capacity, which `IndexedExperts` does not have."""

    def mixture() -> nn.Module:
        if form == "einsum":
            return EinsumExperts(width, inner, experts, k, factor)
        return IndexedExperts(width, inner, experts, k)

    return MoeGPT([Layer(width, heads, mixture()) for _ in range(layers)], vocabulary, length, width, balance)
