"""Models and losses that people write themselves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unseen.family import (
    MIXES,
    NO_GRAPH,
    NOT_IN_A_CUT_PLAN,
    OWN_BACKWARD,
    VOCABULARY,
    Batch,
    Family,
    classes,
    masked,
)

__all__ = ["FAMILIES"]


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for first, second in pairwise(widths):
        layers += [nn.Linear(first, second), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Siamese(nn.Module):
    """Both inputs go through one tower as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(8, 16, 8)

    def forward(self, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
        a, b = self.tower(torch.cat([first, second], 0)).chunk(2, 0)
        distance = (a - b).square().sum(1)
        return (same * distance + (1 - same) * F.relu(1 - distance)).mean()


class SimCLR(nn.Module):
    """Two views as one batch, each compared with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(8, 16, 8)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        views = F.normalize(self.tower(torch.cat([first, second], 0)), dim=-1)
        count = first.shape[0]
        likeness = views @ views.T / 0.5
        likeness = likeness.masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        partner = (torch.arange(2 * count) + count) % (2 * count)
        return F.cross_entropy(likeness, partner)


class DPO(nn.Module):
    """Chosen and rejected as one batch through the model and a frozen reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(VOCABULARY, 16), mlp(16, 24, VOCABULARY))
        self.reference = nn.Sequential(nn.Embedding(VOCABULARY, 16), mlp(16, 24, VOCABULARY)).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids = torch.cat([chosen, rejected], 0)
        with torch.no_grad():
            known = self._likelihood(self.reference, ids)
        gain = self._likelihood(self.policy, ids) - known
        good, bad = gain.chunk(2, 0)
        return -F.logsigmoid(0.5 * (good - bad)).mean()

    def _likelihood(self, model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)


class VAE(nn.Module):
    """Noise from the batch, so that every process draws the same; a reconstruction summed and a divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(12, 16, 8), mlp(4, 16, 12)

    def forward(self, points: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(points).chunk(2, -1)
        made = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, points, reduction="sum") / points.shape[0] + 0.1 * divergence


class UNet(nn.Module):
    """BatchNorm, skips, and pixels that do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        first = self.first(pixels)
        joined = torch.cat([first, self.up(self.down(first))], 1)
        return F.cross_entropy(self.head(joined), labels)


class DLRM(nn.Module):
    """Tables of categories, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, 8, mode="sum") for count in (11, 7, 5))
        self.dense, self.top = mlp(6, 16, 8), mlp(14, 16, 1)
        self.register_buffer("pairs", torch.triu_indices(4, 4, 1))

    def forward(self, numbers: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        dense = self.dense(numbers)
        found = torch.stack([dense, *(t(categories[:, n, None]) for n, t in enumerate(self.tables))], 1)
        products = (found @ found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([dense, products], 1)).squeeze(1), clicked)


class Distillation(nn.Module):
    """Labels where there are some, and a frozen teacher everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.student = mlp(16, 24, VOCABULARY)
        self.teacher = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)).requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.student(self.tokens(ids))
        with torch.no_grad():
            wanted = (self.teacher(ids) / 2).softmax(-1)
        soft = F.kl_div((logits / 2).log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean")
        return 0.5 * F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.5 * 4 * soft


class TwoTasks(nn.Module):
    """Cross entropy of tokens and squares of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.mix, self.head, self.score = mlp(16, 24, 16), nn.Linear(16, VOCABULARY), nn.Linear(16, 1)

    def forward(self, ids: Tensor, labels: Tensor, scores: Tensor) -> Tensor:
        hidden = self.mix(self.tokens(ids))
        token = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return token + 0.3 * F.mse_loss(self.score(hidden.mean(1)).squeeze(1), scores)


class Pointwise(nn.Module):
    """A token model whose loss is one of those that people write by hand."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.mix, self.head = mlp(16, 24, 16), nn.Linear(16, 1)

    def forward(self, ids: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
        found = self.head(self.mix(self.tokens(ids))).squeeze(-1)
        if self.kind == "masked mean":
            mask = (weights > 0.5).float()
            return ((found - targets).abs() * mask).sum() / mask.sum()
        if self.kind == "mean of means":
            mask = (weights > 0.3).float()
            return ((found - targets).square() * mask).sum(1).div(mask.sum(1).clamp(min=1)).mean()
        if self.kind == "weighted":
            return ((found - targets).square() * weights).sum() / weights.sum()
        if self.kind == "focal":
            object_ = (targets > 0.8).float()
            loss = F.binary_cross_entropy_with_logits(found, object_, reduction="none")
            sure = (found.sigmoid() - object_).abs()
            return (loss * sure**2).sum() / object_.sum().clamp(min=1)
        if self.kind == "selected":
            chosen = torch.where(weights > 0.5, F.huber_loss(found, targets, reduction="none"), 0.0)
            return chosen.sum() / (weights > 0.5).sum()
        if self.kind == "dice":
            sure, object_ = found.sigmoid(), (targets > 0).float()
            return (1 - (2 * (sure * object_).sum(1) + 1) / (sure.sum(1) + object_.sum(1) + 1)).mean()
        if self.kind == "perplexity":
            return (found - targets).square().mean().exp()
        penalty = sum(p.square().sum() for p in self.parameters())
        return (found - targets).square().mean() + 1e-3 * penalty


class StraightThrough(torch.autograd.Function):
    """Rounds; its gradient does as if it did not."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(nn.Module):
    """Values rounded by a custom autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(8, 16), mlp(16, 5)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        rounded: Tensor = StraightThrough.apply(4 * self.first(points))
        return F.cross_entropy(self.second(rounded / 4), labels)


class Quantising(Quantised):
    """The same by `detach`."""

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.first(points)
        return F.cross_entropy(self.second(found + (found.mul(4).round() / 4 - found).detach()), labels)


class Deciding(nn.Module):
    """Goes one way or the other by the values in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = mlp(8, 16), mlp(16, 16), mlp(16, 5)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(points)
        if self.first[0].weight.abs().mean() > 1:
            hidden = self.second(hidden)
        return F.cross_entropy(self.third(hidden), labels)


class GroupedNorms(nn.Module):
    """A residual network with GroupNorm and weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.norm, self.deep = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.shift, self.head = nn.InstanceNorm2d(8, affine=True), nn.Linear(8, 5)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.stem(pixels)))
        hidden = hidden + self.shift(self.deep(hidden))
        return F.nll_loss(self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1)).log_softmax(-1), labels)


class Adapted(nn.Module):
    """LoRA: frozen weights with low ranks beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16).requires_grad_(False)
        self.frozen = nn.ModuleList(nn.Linear(16, 16).requires_grad_(False) for _ in range(2))
        self.down = nn.ParameterList(nn.Parameter(torch.randn(4, 16) / 4) for _ in range(2))
        self.up = nn.ParameterList(nn.Parameter(torch.randn(16, 4) / 4) for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        for layer, down, up in zip(self.frozen, self.down, self.up, strict=True):
            hidden = F.gelu(layer(hidden) + hidden @ down.T @ up.T)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class Triplets(nn.Module):
    """An anchor nearer to one than to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(8, 16, 8)

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.tower(anchor), self.tower(near), self.tower(far))


class Spoken(nn.Module):
    """CTC over lengths that come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(4, 16, 3, padding=1), nn.Linear(16, 9)

    def forward(self, sound: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor) -> Tensor:
        found = self.head(F.relu(self.first(sound)).transpose(1, 2)).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(found, labels, lengths, label_lengths)


def _points(*names: str, width: int = 8) -> Any:
    return lambda samples: {name: torch.randn(samples, width) for name in names}


def _same(samples: int) -> Batch:
    return {**_points("first", "second")(samples), "same": torch.randint(0, 2, (samples,)).float()}


def _preferred(samples: int) -> Batch:
    return {name: torch.randint(0, VOCABULARY, (samples, 8)) for name in ("chosen", "rejected")}


def _noisy(samples: int) -> Batch:
    return {"points": torch.randn(samples, 12), "noise": torch.randn(samples, 4)}


def _pixels(samples: int) -> Batch:
    return {"pixels": torch.randn(samples, 3, 8, 8), "labels": masked(torch.randint(0, 5, (samples, 8, 8)))}


def _pictures(samples: int) -> Batch:
    return {"pixels": torch.randn(samples, 3, 8, 8), "labels": classes(samples)}


def _clicks(samples: int) -> Batch:
    return {
        "numbers": torch.randn(samples, 6),
        "categories": torch.randint(0, 5, (samples, 3)),
        "clicked": torch.randint(0, 2, (samples,)).float(),
    }


def _text(samples: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (samples, 8))
    return {"ids": ids, "labels": masked(ids.roll(-1, 1))}


def _scored(samples: int) -> Batch:
    return {**_text(samples), "scores": torch.randn(samples)}


def _weighed(samples: int) -> Batch:
    weights = torch.rand(samples, 8) * torch.linspace(0.3, 1, samples)[:, None]
    return {"ids": torch.randint(0, VOCABULARY, (samples, 8)), "weights": weights, "targets": torch.randn(samples, 8)}


def _labelled(samples: int) -> Batch:
    return {"points": torch.randn(samples, 8), "labels": classes(samples)}


def _sound(samples: int) -> Batch:
    return {
        "sound": torch.randn(samples, 4, 12),
        "labels": torch.randint(1, 9, (samples, 4)),
        "lengths": torch.randint(9, 13, (samples,)),
        "label_lengths": torch.randint(1, 5, (samples,)),
    }


def pointwise(kind: str, **impossible: Any) -> Family:
    return Family(name=f"loss: {kind}", build=lambda: Pointwise(kind), batch=_weighed, **impossible)


FAMILIES = (
    Family(name="siamese", build=Siamese, batch=_same),
    Family(name="SimCLR", build=SimCLR, batch=_points("first", "second"), impossible=NOT_IN_A_CUT_PLAN),
    Family(name="DPO", build=DPO, batch=_preferred),
    Family(name="VAE", build=VAE, batch=_noisy),
    Family(name="U-Net", build=UNet, batch=_pixels, impossible=MIXES),
    Family(name="DLRM", build=DLRM, batch=_clicks),
    Family(name="distillation", build=Distillation, batch=_text),
    Family(name="two tasks", build=TwoTasks, batch=_scored),
    pointwise("masked mean"),
    pointwise("mean of means"),
    pointwise("weighted"),
    pointwise("focal"),
    pointwise("selected"),
    pointwise("dice"),
    pointwise("penalty"),
    pointwise("perplexity", impossible=NOT_IN_A_CUT_PLAN),
    Family(name="autograd.Function", build=Quantised, batch=_labelled, impossible=OWN_BACKWARD),
    Family(name="straight through, detach", build=Quantising, batch=_labelled),
    Family(name="data-dependent control flow", build=Deciding, batch=_labelled, impossible=NO_GRAPH, count="samples"),
    Family(name="GroupNorm, weight norm", build=GroupedNorms, batch=_pictures),
    Family(name="LoRA", build=Adapted, batch=_text),
    Family(name="triplets", build=Triplets, batch=_points("anchor", "near", "far")),
    Family(name="CTC", build=Spoken, batch=_sound, impossible=NO_GRAPH, count="samples"),
)
