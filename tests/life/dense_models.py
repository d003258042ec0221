"""Models of vectors: what their forward and loss read stands in every place where Python can keep a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from life.subject import Batch

__all__ = [
    "CLASSES",
    "SETTINGS",
    "Adapted",
    "Autoencoder",
    "Configured",
    "Deciding",
    "Dropping",
    "Gated",
    "Masked",
    "OfClass",
    "OfContainers",
    "OfDataclass",
    "Parted",
    "Regressor",
    "Resting",
    "Scaled",
    "Siamese",
    "Smoothed",
    "Taught",
    "Tempered",
    "TwoTasks",
    "Uncertain",
    "WithAuxiliary",
    "WithFunction",
    "WithSubmoduleLoss",
    "focal",
    "hits",
    "labelled",
    "noisy",
    "of_class",
    "of_global",
    "pairs",
    "scored",
    "seen_twice",
    "towards",
    "twins",
]  # fmt: skip

CLASSES = 5


class Classifier(nn.Module):
    """Three layers and a head, with a place for whatever a subclass reads."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)
        self.act: nn.Module = nn.GELU()

    def hidden(self, points: Tensor) -> Tensor:
        found = self.act(self.first(points))
        return found + self.act(self.second(found))

    def forward(self, points: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.head(self.hidden(points)), labels)


class Tempered(Classifier):
    temperature = 1.0

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.hidden(points)) / self.temperature, labels)


class Smoothed(Classifier):
    """Label smoothing in training only, as an attribute."""

    smoothing = 0.1

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        smoothing = self.smoothing if self.training else 0.0
        return F.cross_entropy(self.head(self.hidden(points)), labels, label_smoothing=smoothing)


class Resting(Classifier):
    """A part that is not trained for a while: its result is detached, or it runs without gradients."""

    rests = warms = False

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.warms):
            found = self.act(self.first(points))
        found = found + self.act(self.second(found))
        return F.cross_entropy(self.head(found.detach() if self.rests else found), labels)


class Configured(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0, penalty=0.0)

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        logits = self.config.scale * self.head(self.hidden(points))
        loss = F.cross_entropy(logits, labels)
        if self.config.penalty > 0:
            loss = loss + self.config.penalty * logits.square().mean()
        return loss


@dataclass
class Options:
    residual: float = 1.0
    clamp: float | None = None


class OfDataclass(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.options = Options()

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.act(self.first(points))
        found = found + self.options.residual * self.act(self.second(found))
        if self.options.clamp is not None:
            found = found.clamp(max=self.options.clamp)
        return F.cross_entropy(self.head(found), labels)


class OfContainers(Classifier):
    """Numbers in a dict and in a list, tensors in both."""

    def __init__(self) -> None:
        super().__init__()
        self.terms = {"entropy": 1.0, "norm": 0.0}
        self.gains = [1.0, 0.5]
        self.scales = {"hidden": torch.tensor([1.0])}
        self.shifts = [torch.tensor([0.1]), torch.tensor([0.2])]

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        first = self.gains[0] * self.act(self.first(points)) + self.shifts[0]
        second = self.gains[1] * self.act(self.second(first)) * self.scales["hidden"]
        loss = self.terms["entropy"] * F.cross_entropy(self.head(second), labels)
        return loss + self.terms["norm"] * second.square().mean()


SETTINGS = SimpleNamespace(scale=1.0)


class OfGlobal(Classifier):
    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(SETTINGS.scale * self.head(self.hidden(points)), labels)


def of_global() -> nn.Module:
    SETTINGS.scale = 1.0
    return OfGlobal()


class OfClass(Classifier):
    gain = 1.0

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.gain * self.head(self.hidden(points)), labels)


def of_class() -> nn.Module:
    OfClass.gain = 1.0
    return OfClass()


def focal() -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that is a closure; ``set`` changes what it has closed over."""
    sharpness = 1.0

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        missed = 1 - logits.softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
        return (missed**sharpness * F.cross_entropy(logits, labels, reduction="none")).mean()

    def change(value: float) -> None:
        nonlocal sharpness
        sharpness = value

    loss.set = change  # type: ignore[attr-defined]
    return loss


class Masked(Classifier):
    """Weights of a layer and features, masked by buffers; a plain tensor scales what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8))
        self.register_buffer("kept", torch.ones(12, 1), persistent=False)
        self.register_buffer("shift", torch.zeros(12))
        self.scale = torch.tensor([1.0])

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.act(self.first(points * self.mask))
        found = F.linear(found, self.second.weight * self.kept, self.second.bias) + self.shift
        return F.cross_entropy(self.head(found) * self.scale, labels)


class WithAuxiliary(Classifier):
    """A second head: in training only, or when it joins."""

    def __init__(self, *, when: str) -> None:
        super().__init__()
        self.aux = nn.Linear(12, CLASSES)
        self.when, self.joined, self.share = when, False, 0.3

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.act(self.first(points))
        logits = self.head(found + self.act(self.second(found)))
        loss = F.cross_entropy(logits, labels)
        if self.training if self.when == "training" else self.joined:
            loss = loss + self.share * F.cross_entropy(self.aux(found), labels)
        return {"loss": loss, "logits": logits}


class WithSubmoduleLoss(Classifier):
    """The criterion is a submodule."""

    def __init__(self, criterion: Callable[[], nn.Module], *, onehot: bool = False) -> None:
        super().__init__()
        self.criterion, self.onehot = criterion(), onehot

    def forward(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden(points))
        target = F.one_hot(labels, CLASSES).to(logits.dtype) if self.onehot else labels
        return self.criterion(logits, target), logits


class WithFunction(Classifier):
    """The loss is a function in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(points))
        return self.loss_fn(logits, F.one_hot(labels, CLASSES).to(logits.dtype))


class Dropping(Classifier):
    """With a probability of 0 or 1, so that plain PyTorch draws the same; and a number of layers that Python counts."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.depth = nn.Dropout(0.0), 2
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.hidden(points)
        for layer in list(self.layers)[: self.depth]:
            found = found + self.drop(self.act(layer(found)))
        return F.cross_entropy(self.head(found), labels)


class Autoencoder(nn.Module):
    """Its noise comes with the batch; a divergence is added once its weight is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 8))
        self.beta, self.free = 0.0, 0.0

    def forward(self, points: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.encoder(points).chunk(2, -1)
        loss = F.mse_loss(self.decoder(mean + noise * (0.5 * log_variance).exp()), points)
        if self.beta > 0:
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
            loss = loss + self.beta * divergence.clamp(min=self.free).mean()
        return loss


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.margin = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)), 1.0

    def forward(self, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
        distance = (self.tower(first) - self.tower(second)).square().mean(-1)
        return (same * distance + (1 - same) * F.relu(self.margin - distance)).mean()


class TwoTasks(nn.Module):
    """Two heads with a loss each, whose weights are in a dict; a head can rest."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.scores = nn.Linear(8, 12), nn.Linear(12, CLASSES), nn.Linear(12, 1)
        self.shares, self.active = {"classes": 1.0, "scores": 0.5}, "both"

    def forward(self, points: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        found = torch.tanh(self.trunk(points))
        loss = found.sum() * 0
        if self.active in ("both", "classes"):
            loss = loss + self.shares["classes"] * F.cross_entropy(self.classes(found), labels)
        if self.active in ("both", "scores"):
            loss = loss + self.shares["scores"] * F.mse_loss(self.scores(found).squeeze(-1), targets)
        return loss


class Uncertain(nn.Module):
    """Two losses, each with a learned variance."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.scores = nn.Linear(8, 12), nn.Linear(12, CLASSES), nn.Linear(12, 1)
        self.spread = nn.Parameter(torch.zeros(2))

    def forward(self, points: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        found = F.silu(self.trunk(points))
        one = F.cross_entropy(self.classes(found), labels)
        other = F.mse_loss(self.scores(found).squeeze(-1), targets)
        return (-self.spread).exp()[0] * one + (-self.spread).exp()[1] * other + self.spread.sum()


class Taught(nn.Module):
    """A student and a teacher that is moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Classifier(), Classifier().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.consistency = 1.0

    def forward(self, points: Tensor, other: Tensor, labels: Tensor) -> Tensor:
        logits = self.student.head(self.student.hidden(points))
        with torch.no_grad():
            wanted = self.teacher.head(self.teacher.hidden(other)).softmax(-1)
        apart = F.mse_loss(logits.softmax(-1), wanted)
        return F.cross_entropy(logits, labels) + self.consistency * apart


class Adapted(nn.Module):
    """A frozen layer with a low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 12).requires_grad_(False), nn.Linear(12, CLASSES)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.alpha = 1.0

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.base(points) + self.alpha * self.up(self.down(points))
        return F.cross_entropy(self.head(F.gelu(found)), labels)


class Scaled(nn.Module):
    """Like CLIP's head: normalised features against prototypes, with a learned temperature that scripts clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.logit_scale = nn.Linear(8, 12), nn.Parameter(torch.tensor(1.0))
        self.register_buffer("prototypes", torch.linspace(-1, 1, CLASSES * 12).view(CLASSES, 12).sin())

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        features = F.normalize(torch.tanh(self.tower(points)), dim=-1)
        return F.cross_entropy(self.logit_scale.exp() * features @ self.prototypes.T, labels)


class Gated(Classifier):
    """Two layers of which each sample takes a mixture, by a gate with noise or without."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.sharpness, self.hooks = nn.Linear(12, 2), 1.0, []

    def forward(self, points: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.act(self.first(points))
        share = (self.sharpness * self.gate(found)).softmax(-1)
        mixed = share[:, :1] * self.second(found) + share[:, 1:] * found
        for hook in self.hooks:
            mixed = hook(mixed)
        return {"loss": F.cross_entropy(self.head(mixed), labels)}


class Parted(nn.Module):
    """Weights in a list, of which some rest."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3))
        self.head, self.used = nn.Linear(8, CLASSES), [True, True, True]

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        for weight, used in zip(self.maps, self.used, strict=True):
            if used:
                points = points + torch.tanh(points @ weight)
        return F.cross_entropy(self.head(points), labels)


class Regressor(nn.Sequential):
    """Called with its points alone: the loss is outside."""

    def __init__(self, out: int) -> None:
        super().__init__(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, out))


class Deciding(Classifier):
    """Goes one way or the other by its weights: torch.export gives no graph of it."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.beta, self.reduction, self.scale = 0.0, reduction, torch.tensor([1.0])
        self.register_buffer("mask", torch.ones(8))
        self.register_buffer("class_weight", torch.ones(CLASSES))

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:
        found = self.act(self.first(points * self.mask))
        if self.first.weight.abs().mean() > 1e-3:
            found = self.act(self.second(found))
        logits = self.head(found) * self.scale
        loss = (self.class_weight[labels] * F.cross_entropy(logits, labels, reduction="none")).sum()
        if self.beta > 0:
            loss = loss + self.beta * logits.square().mean(-1).sum()
        return loss / len(points) if self.reduction == "mean" else loss


def labelled(samples: int) -> Batch:
    return {"points": torch.randn(samples, 8), "labels": torch.randint(0, CLASSES, (samples,))}


def pairs(samples: int) -> Batch:
    return tuple(labelled(samples).values())  # type: ignore[union-attr]  # it is a dict


def towards(out: int) -> Callable[[int], Batch]:
    return lambda samples: (torch.randn(samples, 8), torch.randn(samples, out))


def hits(samples: int) -> Batch:
    return torch.randn(samples, 8), torch.randint(0, 2, (samples, 3)).float()


def noisy(samples: int) -> Batch:
    return {"points": torch.randn(samples, 8), "noise": torch.randn(samples, 4)}


def twins(samples: int) -> Batch:
    one, other = torch.randn(samples, 8), torch.randn(samples, 8)
    return {"first": one, "second": other, "same": torch.randint(0, 2, (samples,)).float()}


def scored(samples: int) -> Batch:
    return {**labelled(samples), "targets": torch.randn(samples)}  # type: ignore[dict-item]  # it is a dict


def seen_twice(samples: int) -> Batch:
    points = torch.randn(samples, 8)
    return {
        "points": points,
        "other": points + 0.1 * torch.randn(samples, 8),
        "labels": torch.randint(0, CLASSES, (samples,)),
    }
