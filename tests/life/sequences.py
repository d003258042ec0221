"""Models of sequences and of images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from life.subject import Batch, Change, Subject, number, part, rebound, weight

__all__ = ["SUBJECTS"]

VOCABULARY, WIDTH, LENGTH = 17, 12, 6
FLAT = ("data", "data 3", "zero 1", "zero 3", "1F1B", "interleaved", "mixed", "auto")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.also = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.residual = 1.0

    def forward(self, hidden: Tensor, *, causal: bool) -> Tensor:
        batch, length, _ = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(batch, length, -1)
        hidden = hidden + self.residual * self.out(mixed)
        return hidden + self.mlp(self.also(hidden))


class GPT(nn.Module):
    """Its labels are ignored unevenly; ``tied``: head and embedding are one."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.z_loss, self.cap = 0.0, None

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, causal=True)
        logits = self.head(self.norm(hidden))
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.z_loss > 0:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().mean()
        return loss


class Tagger(nn.Module):
    """An encoder with an attention bias that scripts set, and class weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block, self.head = nn.Embedding(VOCABULARY, WIDTH), Block(), nn.Linear(WIDTH, 4)
        self.register_buffer("class_weight", torch.ones(4))
        self.register_buffer("decay", torch.ones(1))
        self.ignored = -100

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.block(self.tokens(ids) * self.decay, causal=False)
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), labels.flatten(), self.class_weight, ignore_index=self.ignored
        )


class Counted(nn.Module):
    """A masked mean by hand, with an exponent and a floor that scripts set."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.power, self.floor = 1.0, 0.0

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        found = self.head(F.gelu(self.mix(self.tokens(ids)))).squeeze(-1)
        wrong = (found - targets).abs().clamp(min=1e-3) ** (self.power + 1) * (mask > self.floor)
        return wrong.sum() / (mask > self.floor).sum().clamp(min=1)


class Convolutional(nn.Module):
    """Residual, with BatchNorm or without."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        make = {"batch": lambda: nn.BatchNorm2d(8), "group": lambda: nn.GroupNorm(2, 8)}[norm]
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), make()
        self.deep, self.after, self.head = nn.Conv2d(8, 8, 3, padding=1), make(), nn.Linear(8, 5)
        self.act: nn.Module = nn.ReLU()
        self.smoothing = 0.0

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.act(self.norm(self.stem(pixels)))
        hidden = hidden + self.act(self.after(self.deep(hidden)))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return logits


class Denoiser(nn.Module):
    """Levels of noise are looked up in a table, which scripts exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.9, 0.1, 4))
        self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.prediction = "noise"

    def forward(self, points: Tensor, noise: Tensor, level: Tensor) -> dict[str, Tensor]:
        alpha = self.alphas[level].unsqueeze(-1)
        seen = alpha.sqrt() * points + (1 - alpha).sqrt() * noise
        found = self.net(torch.cat([seen, alpha], -1))
        return {"loss": F.mse_loss(found, noise if self.prediction == "noise" else points)}


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.top = nn.Embedding(11, 8), nn.Embedding(7, 8), nn.Linear(8, 1)
        self.regularised = 0.0

    def forward(self, user: Tensor, item: Tensor, clicked: Tensor) -> Tensor:
        mine, other = self.users(user), self.items(item)
        loss = F.binary_cross_entropy_with_logits(self.top(mine * other).squeeze(-1), clicked)
        return loss + self.regularised * (mine.square() + other.square()).mean()


class Recurrent(nn.Module):
    """Goes over the sequence in Python; what it forgets is a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cell, self.head = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )
        self.forget = torch.tensor([0.5])

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        seen = self.tokens(ids)
        hidden = torch.zeros_like(seen[:, 0])
        for place in range(ids.shape[1]):
            new = torch.tanh(self.cell(torch.cat([hidden, seen[:, place]], -1)))
            hidden = self.forget * hidden + (1 - self.forget) * new
        return (F.cross_entropy(self.head(hidden), labels[:, 0]),)


class Pooled(nn.Module):
    """A bag of words with padding, whose loss is a margin of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gains = nn.ParameterDict({"up": nn.Parameter(torch.ones(WIDTH)), "down": nn.Parameter(torch.zeros(WIDTH))})
        self.padding, self.margin = 0, 1.0

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        kept = (ids != self.padding).to(self.mix.weight.dtype).unsqueeze(-1)
        pooled = (self.tokens(ids) * kept).sum(1) / kept.sum(1).clamp(min=1)
        scores = self.mix(pooled) * self.gains["up"] + self.gains["down"]
        return F.multi_margin_loss(scores, labels[:, 0], margin=self.margin)


def text(samples: int, length: int = LENGTH) -> Batch:
    ids = torch.randint(0, VOCABULARY, (samples, length))
    keep = torch.rand(samples, length) < torch.linspace(0.2, 0.9, samples)[:, None]
    keep[-1, 0] = True
    return {"ids": ids, "labels": ids.roll(-1, 1).masked_fill(~keep, -100)}


def tagged(samples: int, length: int = LENGTH) -> Batch:
    ids = torch.randint(0, VOCABULARY, (samples, length))
    return {"ids": ids, "labels": ids % 4}


def counted(samples: int) -> Batch:
    return {
        "ids": torch.randint(0, VOCABULARY, (samples, 6)),
        "mask": torch.rand(samples, 6),
        "targets": torch.randn(samples, 6),
    }


def pictures(samples: int, size: int = 6) -> Batch:
    return torch.randn(samples, 3, size, size), torch.randint(0, 5, (samples,))


def noised(samples: int) -> Batch:
    return {
        "points": torch.randn(samples, 8),
        "noise": torch.randn(samples, 8),
        "level": torch.randint(0, 4, (samples,)),
    }


def clicks(samples: int) -> Batch:
    return {
        "user": torch.randint(0, 11, (samples,)),
        "item": torch.randint(0, 7, (samples,)),
        "clicked": torch.randint(0, 2, (samples,)).float(),
    }


OF_TEXT = (
    *part("blocks[0]"),
    *weight("blocks[1].mlp[0].weight"),
    number("blocks[0].residual", 1.0, 0.5, 0.0),
    number("z_loss", 0.0, 0.01, 0.1, kind="term added"),
    number("cap", None, 5.0, 1.0),
)
TIED = tuple(replace(change, names=("head.weight", "tokens.weight")) for change in weight("head.weight"))
BATCH_NORM = (
    Change("batch norm frozen or thawed", ("norm",), "model.norm.train({})", ("True", "False")),
    Change(
        "batch norm frozen or thawed",
        ("norm", "after", "training"),
        "for module in (model.norm, model.after): module.train({})",
        ("True", "False"),
    ),
    Change("mode left on", ("training", "eval", "norm", "after"), "model.train({})", ("True", "False")),
    number("norm.momentum", 0.1, 0.01, 0.5, kind="number on the model"),
    Change("buffer in place", ("running_mean", "norm"), "model.norm.running_mean.zero_()", alone=True),
    rebound("after.running_var", "[1., 1., 1., 1., 1., 1., 1., 1.]", "[0.5, 2., 1., 1., 2., 0.5, 1., 1.]"),
)
OF_PICTURES = (
    *part("deep"),
    *weight("stem.weight"),
    Change("activation replaced", ("act",), "model.act = {}", ("nn.ReLU()", "nn.SiLU()")),
)

SUBJECTS = (
    Subject(
        name="GPT", build=GPT, batch=text, by_sample=False, shapes=({"length": 9}, {"length": 12}), changes=OF_TEXT
    ),
    Subject(
        name="GPT, tied",
        build=lambda: GPT(tied=True),
        batch=text,
        by_sample=False,
        shapes=({"length": 9},),
        changes=(*OF_TEXT, *TIED),
    ),
    Subject(
        name="tagger",
        build=Tagger,
        batch=tagged,
        by_sample=False,
        shapes=({"length": 8},),
        changes=(
            *part("tokens"),
            *weight("head.weight"),
            rebound("class_weight", "[1., 1., 1., 1.]", "[0.2, 1., 2., 0.5]", kind="class weights rebound"),
            Change(
                "class weights in place",
                ("class_weight",),
                "model.class_weight.mul_(torch.tensor({}))",
                ("[1., 1., 1., 1.]", "[0.5, 2., 1., 3.]"),
                alone=True,
            ),
            number("ignored", -100, 2, kind="criterion's number changed"),
            rebound("decay", "[1.]", "[0.5]", "[[2.]]"),
        ),
    ),
    Subject(
        name="recurrent",
        build=Recurrent,
        batch=tagged,
        shapes=({"length": 4}, {"length": 8}),
        changes=(
            *part("cell"),
            *weight("head.weight"),
            rebound("forget", "[0.5]", "[0.1]", "[[0.9]]", kind="plain tensor rebound"),
            Change("plain tensor in place", ("forget",), "model.forget.fill_({})", ("0.5", "0.1", "0.9"), alone=True),
        ),
    ),
    Subject(
        name="bag of words",
        build=Pooled,
        batch=tagged,
        shapes=({"length": 8},),
        changes=(
            *part("tokens"),
            *weight("gains['up']"),
            number("padding", 0, 1, -1),
            number("margin", 1.0, 0.5, 2.0, kind="criterion's number changed"),
        ),
    ),
    Subject(
        name="masked mean",
        build=Counted,
        batch=counted,
        by_sample=False,
        changes=(
            *part("mix"),
            *weight("mix.weight"),
            number("power", 1.0, 0.5, 2.0),
            number("floor", 0.0, 0.5, 0.8, kind="criterion's number changed"),
        ),
    ),
    Subject(
        name="convolutions, batch norm",
        build=lambda: Convolutional("batch"),
        batch=pictures,
        criterion=nn.CrossEntropyLoss,
        outputs=True,
        plans=FLAT[:-2],
        changes=(
            *OF_PICTURES,
            *BATCH_NORM,
            number("label_smoothing", 0.0, 0.2, at="criterion", kind="criterion's number changed"),
        ),
    ),
    Subject(
        name="convolutions, group norm",
        build=lambda: Convolutional("group"),
        batch=pictures,
        criterion=nn.CrossEntropyLoss,
        outputs=True,
        shapes=({"size": 8},),
        changes=OF_PICTURES,
    ),
    Subject(
        name="denoiser",
        build=Denoiser,
        batch=noised,
        changes=(
            rebound("alphas", "[0.9, 0.6333333, 0.3666667, 0.1]", "[0.8, 0.6, 0.4, 0.2]", "[0.99, 0.9, 0.5, 0.05]"),
            Change("buffer in place", ("alphas",), "model.alphas.clamp_(max={})", ("1.0", "0.5"), alone=True),
            number("prediction", "'noise'", "'points'"),
            *part("net[0]"),
            *weight("net[2].weight"),
        ),
    ),
    Subject(
        name="recommender",
        build=Recommender,
        batch=clicks,
        changes=(*part("users"), *weight("items.weight"), number("regularised", 0.0, 0.1, 1.0)),
    ),
)
