"""The module on parts of a batch against itself on the whole: what is refused, and what is seen."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError, HeterodyneError
from heterodyne.frontend.opaque import CountGiven
from multiprocess.opaque_models import graph_of, labelled, make

WIDTH = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))


class ChoosesForAll(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y * 2 if y[0].sum() > 0 else y).pow(2).mean()


class NormsOverSamples(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y / y.detach().abs().max()).pow(2).mean()


class NormsSome(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (self.norm(y) if x[0, 0] > 0 else y).pow(2).mean()


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(x).pow(2).mean()


class PutsAnother(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.layer(x).pow(2).mean()


class DrawsInPython(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).pow(2).mean() * random.random()


class Shuffles(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[torch.randperm(len(x))]).pow(2).mean()


class DropsLayers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) if torch.rand(()) < 0.5 else x * self.layer.bias).pow(2).mean()


@pytest.mark.tour("law 1", "runtime/exact/")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            ChoosesForAll,
            "do not add up .* 1 \\+ 1 .* the loss of the whole is .*, that of the parts .* samples see each other",
        ),
        (NormsOverSamples, "do not add up .* samples see each other"),
        (NormsSome, "BatchNorm is reached with some samples and not with others"),
        (Counts, "forward changes 'seen'"),
        (PutsAnother, "forward changes 'seen'"),
        (DrawsInPython, "Python's random"),
        (Shuffles, "aten.randperm.* cannot be made to belong to the samples"),
        (DropsLayers, "its first dim must be the samples"),
    ],
)
def test_what_would_not_be_one_device_is_refused(kind: type[Layer], told: str) -> None:
    torch.manual_seed(0)
    model = kind()
    if kind is not NormsSome:
        model.norm.eval()
    with pytest.raises(HeterodyneError, match=told):
        graph_of(model, {"x": torch.randn(8, WIDTH)}, "samples")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("early", "sum", "loss_count='samples': is it that"),
        ("normed", "samples", "loss_count='sum': is it that"),
        ("routed", "samples", "Either loss_count is not what the loss divides by"),
        ("routed", lambda batch: labelled(batch) + 1, "do not add up"),
        ("routed", "tokens", "neither 'samples'"),
        ("routed", lambda batch: -1, "it must be a number, 0 or more"),
    ],
)
def test_a_wrong_count_is_refused(name: str, given: CountGiven, told: str) -> None:
    module, batch, _ = make(name, 6)
    with pytest.raises(CaptureError, match=told):
        graph_of(module, batch, given)


def test_draws_and_batch_norm_are_seen() -> None:
    seen = {name: graph_of(*make(name, 6))[0] for name in ("early", "routed", "normed")}
    assert [bool(graph.random) for graph in seen.values()] == [False, True, False]
    assert [bool(graph.batch_statistics) for graph in seen.values()] == [False, False, True]
    module, batch, count = make("early", 6)
    with pytest.raises(CaptureError, match="has one sample"):
        graph_of(module, {name: tensor[:1] for name, tensor in batch.items()}, count)
