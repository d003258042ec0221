"""Models that no graph can hold, each with a batch and what its loss counts: data-dependent control flow, kernels of their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.frontend.opaque import CountGiven, opaque, read_count
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.runtime.exact.parts import Seen, run_in_parts
from heterodyne.runtime.slices import as_source

Made = tuple[nn.Module, dict[str, Tensor], CountGiven]
WIDTH, IGNORED = 6, -100


class EarlyExit(nn.Module):
    """Each sample leaves when it is sure enough; a branch that few take has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.stack([self.one(*sample) for sample in zip(x, y, strict=True)]).mean()

    def one(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            if x.norm() < 1:
                break
            x = torch.tanh(self.step(x))
        if y > 1.5:
            x = self.rare(x)
        return (self.head(x).squeeze(-1) - y).pow(2)


class Twice(torch.autograd.Function):
    """A kernel of one's own, with a gradient of its own: 3 where 2 would be true."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
        return upstream * 3


class Routed(nn.Module):
    """Experts in a loop over those that any token chose, ragged sequences, labels that do not count, dropout, a kernel of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        tokens = tokens[:, : int(lengths.max())]
        h = self.drop(self.embed(tokens))
        chosen = self.router(h).softmax(-1)
        best = chosen.argmax(-1)
        out = torch.zeros_like(h)
        for expert in best.unique().tolist():
            rows, places = torch.nonzero(best == expert, as_tuple=True)
            of_expert = self.experts[expert](h[rows, places]) * chosen[rows, places, expert, None]
            out = out.index_put((rows, places), of_expert)
        logits = self.head(h + Twice.apply(out))
        return F.cross_entropy(logits.flatten(0, 1), labels[:, : tokens.shape[1]].flatten(), ignore_index=IGNORED)


class Normed(nn.Module):
    """BatchNorm before a choice; a sum for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.high, self.low = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.high(row) if row[0] > 0 else self.low(row) for row in self.norm(self.first(x))]
        return torch.cat(rows).pow(2).sum()


class Forces(nn.Module):
    """What it is fitted to are gradients of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.energy(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return (force - 1).pow(2).mean() + energy.pow(2).mean()


def labelled(batch: Any) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def make(name: str, samples: int) -> Made:
    """The same in every process. The first samples never take the rare branch, nor choose all experts."""
    torch.manual_seed(1)
    if name == "early":
        early, x = EarlyExit(), torch.randn(samples, WIDTH) * 2
        return early, {"x": x, "y": torch.linspace(-1, 2, samples)}, "samples"
    if name == "forces":
        return Forces(), {"x": torch.randn(samples, WIDTH)}, "samples"
    if name == "normed":
        return Normed(), {"x": torch.randn(samples, WIDTH)}, "sum"
    lengths = torch.arange(samples) % 5 + 2
    tokens = torch.randint(0, 11, (samples, 7))
    places = torch.arange(7).expand(samples, 7)
    labels = torch.where((places < lengths[:, None]) & (places % 3 > 0), tokens.roll(-1, 1), IGNORED)
    return Routed(), {"tokens": tokens, "lengths": lengths, "labels": labels}, labelled


def graph_of(module: nn.Module, batch: dict[str, Tensor], given: CountGiven) -> tuple[ModelGraph, LossCount]:
    """What `distribute` says of it, and what its loss counts."""
    count = read_count(given)
    made = functools.partial(opaque, module, batch, reason="for a test", loss=count.loss, count=count)
    draft = made(random=True, batch_norm=False)
    seen: Seen = run_in_parts(
        module,
        as_source(batch, draft.graph),
        graph=draft.graph,
        loss_count=draft.loss_count,
        device=torch.device("cpu"),
    )
    found = made(random=seen.random, batch_norm=seen.batch_norm)
    return found.graph, found.loss_count
