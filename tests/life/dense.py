"""Models of vectors: what their forward and loss read stands in every place where Python can keep a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from life.subject import RUN_WHOLE, Batch, Change, Subject, number, part, rebound, weight

__all__ = ["SUBJECTS"]

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


WEIGHTS = ("[1., 1., 1., 1., 1.]", "[0.2, 1., 2., 0.5, 3.]", "[3., 1., 0.4, 1., 0.2]")
OUTSIDE = ("criterion.weight", "'weight'", ".weight")
LAYERS = (*part("second"), *weight("second.weight"), *weight("head.bias", kinds=("scaled", "data")))
ACTIVATION = Change("activation replaced", ("act",), "model.act = {}", ("nn.GELU()", "nn.Tanh()", "nn.SiLU()"))
MEAN_TEACHER = (
    "with torch.no_grad(), whole_weights():\n"
    "    for mine, other in zip(model.teacher.parameters(), model.student.parameters()):\n"
    "        mine.mul_(0.7).add_(other, alpha=0.3)"
)


def _criterion(*changes: Change, **more: Any) -> Subject:
    return Subject(
        batch=pairs,
        outputs=True,
        build=lambda: Regressor(CLASSES),
        changes=(*changes, *part("[2]"), *weight("[2].weight")),
        **more,
    )


SUBJECTS = (
    Subject(
        name="temperature",
        build=Tempered,
        batch=labelled,
        changes=(*LAYERS, ACTIVATION, number("temperature", 1.0, 0.5, 2.0)),
    ),
    Subject(
        name="smoothing in training",
        build=Smoothed,
        batch=labelled,
        changes=(*LAYERS, number("smoothing", 0.1, 0.0, 0.3)),
    ),
    Subject(
        name="a config",
        build=Configured,
        batch=labelled,
        changes=(
            *LAYERS,
            number("config.scale", 1.0, 0.5, 3.0, kind="number in a config"),
            number("config.penalty", 0.0, 0.1, 0.5, kind="term added"),
        ),
    ),
    Subject(
        name="a dataclass",
        build=OfDataclass,
        batch=labelled,
        changes=(
            number("options.residual", 1.0, 0.0, 0.5, kind="number in a config"),
            number("options.clamp", None, 0.5, 0.1, kind="number in a config"),
            ACTIVATION,
        ),
    ),
    Subject(
        name="containers",
        build=OfContainers,
        batch=labelled,
        changes=(
            number("terms['entropy']", 1.0, 0.5, 2.0, kind="number in a container"),
            number("terms['norm']", 0.0, 0.1, 0.3, kind="number in a container"),
            number("gains[1]", 0.5, 1.0, -0.5, kind="number in a container"),
            rebound("scales['hidden']", "[1.0]", "[0.5]", "[2.0]", kind="tensor in a container rebound"),
            rebound("shifts[0]", "[0.1]", "[0.5]", "[[-0.2]]", kind="tensor in a container rebound"),
            Change(
                "tensor in a container in place",
                ("shifts",),
                "model.shifts[1].add_({})",
                ("0.0", "0.3", "-0.2"),
                alone=True,
            ),
        ),
    ),
    Subject(
        name="a global",
        build=of_global,
        batch=labelled,
        uses={"SETTINGS": SETTINGS},
        changes=(
            *LAYERS,
            Change(
                "number in a global", ("SETTINGS", "scale"), "SETTINGS.scale = {}", ("1.0", "0.5", "2.0"), alone=True
            ),
        ),
    ),
    Subject(
        name="a class attribute",
        build=of_class,
        batch=labelled,
        uses={"OfClass": OfClass},
        changes=(
            *LAYERS,
            Change("number in a class", ("gain",), "OfClass.gain = {}", ("1.0", "0.5", "2.0"), alone=True),
        ),
    ),
    _criterion(
        Change("number in a closure", ("sharpness", "loss"), "criterion.set({})", ("1.0", "2.0", "0.5"), alone=True),
        name="a closure as loss",
        criterion=focal,
    ),
    Subject(
        name="masks",
        build=Masked,
        batch=labelled,
        changes=(
            *LAYERS,
            rebound("mask", "[1., 1., 1., 1., 1., 1., 1., 1.]", "[1., 0., 1., 0., 1., 1., 2., 1.]", "[0.5]"),
            rebound("scale", "[1.0]", "[0.5]", "[[2.0]]", kind="plain tensor rebound"),
            Change("buffer in place", ("kept",), "model.kept[{}] = 0", ("[]", "[0, 3]", "5:9"), alone=True),
            Change("buffer in place", ("mask",), "model.mask.mul_({})", ("1.0", "0.5", "1.5"), alone=True),
            Change(
                "buffer in place",
                ("shift",),
                "model.shift.copy_(torch.linspace(0, {}, 12))",
                ("0.0", "1.0", "-1.0"),
                alone=True,
            ),
            Change("plain tensor in place", ("scale",), "model.scale.fill_({})", ("1.0", "0.5", "2.0"), alone=True),
        ),
    ),
    Subject(
        name="auxiliary head in training",
        build=lambda: WithAuxiliary(when="training"),
        batch=labelled,
        changes=(*part("second"), number("share", 0.3, 0.0, 1.0), *weight("aux.weight")),
    ),
    Subject(
        name="auxiliary head that joins",
        build=lambda: WithAuxiliary(when="joined"),
        batch=labelled,
        plans=(*RUN_WHOLE, "1F1B", "auto"),
        changes=(
            *part("second"),
            number("joined", False, True, kind="head joined or left"),
            number("share", 0.3, 0.0, 1.0),
        ),
    ),
    Subject(
        name="class weights in a submodule",
        build=lambda: WithSubmoduleLoss(lambda: nn.CrossEntropyLoss(weight=torch.ones(CLASSES))),
        batch=labelled,
        by_sample=False,
        changes=(
            *LAYERS,
            rebound("criterion.weight", *WEIGHTS, kind="class weights rebound"),
            Change(
                "class weights in place", OUTSIDE, "model.criterion.weight.mul_(torch.tensor({}))", WEIGHTS, alone=True
            ),
            number("criterion.label_smoothing", 0.0, 0.2, kind="criterion's number changed"),
            number("criterion.ignore_index", -100, 2, kind="criterion's number changed"),
            number("criterion.reduction", "'mean'", "'sum'", kind="criterion's reduction changed"),
            number(
                "criterion",
                "nn.CrossEntropyLoss(weight=torch.ones(5))",
                "nn.MultiMarginLoss()",
                kind="criterion replaced",
            ),
        ),
    ),
    Subject(
        name="squares or distances",
        build=lambda: WithSubmoduleLoss(nn.MSELoss, onehot=True),
        batch=labelled,
        changes=(
            *LAYERS,
            ACTIVATION,
            number("criterion", "nn.MSELoss()", "nn.L1Loss()", "nn.HuberLoss(delta=0.3)", kind="criterion replaced"),
        ),
    ),
    Subject(
        name="a function as loss",
        build=WithFunction,
        batch=labelled,
        changes=(*LAYERS, number("loss_fn", "F.mse_loss", "F.smooth_l1_loss", "F.l1_loss", kind="criterion replaced")),
    ),
    Subject(
        name="dropout and depth",
        build=Dropping,
        batch=labelled,
        changes=(
            number("drop.p", 0.0, 1.0, kind="dropout changed"),
            number("depth", 2, 1, kind="layers left out"),
            ACTIVATION,
            *weight("layers[0].weight"),
        ),
    ),
    Subject(
        name="autoencoder",
        build=Autoencoder,
        batch=noisy,
        changes=(
            *part("encoder"),
            *weight("decoder[0].weight"),
            number("beta", 0.0, 0.1, 0.5, kind="term added"),
            number("free", 0.0, 0.5),
        ),
    ),
    Subject(
        name="siamese",
        build=Siamese,
        batch=twins,
        changes=(number("margin", 1.0, 0.5, 2.0), *weight("tower[0].weight"), *part("tower[0]")),
    ),
    Subject(
        name="two tasks",
        build=TwoTasks,
        batch=scored,
        changes=(
            number("shares['scores']", 0.5, 1.0, 0.0, kind="number in a container"),
            number("active", "'both'", "'classes'", "'scores'", kind="head joined or left"),
            *part("scores"),
            *weight("trunk.weight"),
        ),
    ),
    Subject(
        name="learned variances",
        build=Uncertain,
        batch=scored,
        changes=(*weight("spread", kinds=("clamped", "data", "clamped under .data")), *part("trunk")),
    ),
    Subject(
        name="mean teacher",
        build=Taught,
        batch=seen_twice,
        changes=(
            number("consistency", 1.0, 0.0, 3.0),
            Change("teacher moved", ("teacher", "student"), MEAN_TEACHER),
            Change("teacher moved", ("teacher", "student"), MEAN_TEACHER.replace(", whole_weights()", "")),
        ),
    ),
    Subject(
        name="low ranks",
        build=Adapted,
        batch=labelled,
        changes=(
            number("alpha", 1.0, 2.0, 0.5),
            Change("frozen part thawed", ("base",), "model.base.requires_grad_(True)"),
            *weight("up.weight"),
        ),
    ),
    Subject(
        name="clamped temperature",
        build=Scaled,
        batch=labelled,
        changes=(
            *weight("logit_scale", kinds=("clamped", "data", "clamped under .data")),
            rebound("prototypes", "[[0.]]", "[[1., -1., 1., -1., 1., -1., 1., -1., 1., -1., 1., -1.]] * 5"),
        ),
    ),
    _criterion(
        rebound("weight", *WEIGHTS, at="criterion", kind="class weights rebound"),
        Change("class weights in place", OUTSIDE, "criterion.weight.copy_(torch.tensor({}))", WEIGHTS, alone=True),
        number("label_smoothing", 0.0, 0.2, at="criterion", kind="criterion's number changed"),
        number("ignore_index", -100, 2, at="criterion", kind="criterion's number changed"),
        number("reduction", "'mean'", "'sum'", at="criterion", kind="criterion's reduction changed"),
        name="class weights outside",
        criterion=lambda: nn.CrossEntropyLoss(weight=torch.ones(CLASSES)),
        by_sample=False,
    ),
    Subject(
        name="positive weights outside",
        build=lambda: Regressor(3),
        batch=hits,
        criterion=lambda: nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)),
        outputs=True,
        changes=(
            rebound(
                "pos_weight", "[1., 1., 1.]", "[3., 0.5, 2.]", "[2.]", at="criterion", kind="class weights rebound"
            ),
            *part("[2]"),
            *weight("[4].weight"),
        ),
    ),
    Subject(
        name="Huber outside",
        build=lambda: Regressor(2),
        batch=towards(2),
        criterion=nn.HuberLoss,
        outputs=True,
        changes=(
            number("delta", 1.0, 0.3, 2.0, at="criterion", kind="criterion's number changed"),
            *part("[0]"),
            *weight("[4].weight"),
            Change("activation replaced", ("1",), "model[1] = {}", ("nn.Tanh()", "nn.SiLU()")),
        ),
    ),
    Subject(
        name="squares outside",
        build=lambda: Regressor(2),
        batch=towards(2),
        criterion=nn.MSELoss,
        outputs=True,
        changes=(*part("[2]"), *weight("[0].weight")),
    ),
    Subject(
        name="no graph, a mean",
        build=Deciding,
        batch=labelled,
        plans=("data", "data 3", "zero 1"),
        loss_count="samples",
        changes=(
            *LAYERS,
            number("beta", 0.0, 0.1, 0.5, kind="term added"),
            rebound("scale", "[1.0]", "[0.5]", "[[2.0]]", kind="plain tensor rebound"),
            rebound("mask", "[1., 1., 1., 1., 1., 1., 1., 1.]", "[1., 0., 1., 0., 1., 1., 2., 1.]", "[0.5]"),
            rebound("class_weight", *WEIGHTS, kind="class weights rebound"),
            ACTIVATION,
        ),
    ),
    Subject(
        name="no graph, a sum",
        build=lambda: Deciding("sum"),
        batch=labelled,
        plans=("data", "data 3", "zero 1"),
        loss_count="sum",
        by_sample=False,
        changes=(*LAYERS, number("beta", 0.0, 0.1, 0.5, kind="term added")),
    ),
)
