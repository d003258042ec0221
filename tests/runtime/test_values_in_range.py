"""Values that the model cannot look up are found on the host, with their place; what it never looks at may be anything."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend import capture
from heterodyne.graph.value_bounds import value_bounds
from heterodyne.runtime.values_in_range import ValuesInRange
from multiprocess.models import Case, build, captured


def case(name: str) -> Case:
    return build(captured(name), 4)


def with_value(batch: Mapping[str, Tensor], field: str, place: tuple[int, ...], value: int) -> dict[str, Tensor]:
    tensor = batch[field].clone()
    tensor[place] = value
    return {**batch, field: tensor}


@pytest.mark.parametrize(
    ("name", "field", "place", "value", "told"),
    [
        ("gpt", "input_ids", (3, 2), 23, r"step 12, sample 13: input_ids holds 23; .* at models.py:\d+ has 23 rows \(0 ... 22\)"),
        ("gpt", "input_ids", (0, 0), -1, r"sample 10: input_ids holds -1; the embedding"),
        ("gpt", "labels", (2, 1), 23, r"sample 12: labels holds 23; the loss at models.py:\d+ has 23 classes \(0 ... 22, or -100"),
        ("gpt", "labels", (1, 7), -2, "sample 11: labels holds -2"),
        ("gpt2", "labels", (2, 1), 10**6, "sample 12: labels holds 1000000; the loss at modeling_gpt2.py"),
        ("weighted", "labels", (1,), -1, "sample 11: labels holds -1; the loss"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_told_with_its_place(
    name: str, field: str, place: tuple[int, ...], value: int, told: str
) -> None:
    found = case(name)
    with pytest.raises(DataError, match=told):
        ValuesInRange(found.graph).require(with_value(found.batch, field, place, value), 10, "step 12")


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_what_is_left_out_or_never_looked_up_may_be_anything(name: str) -> None:
    found = case(name)
    batch = with_value(with_value(found.batch, "labels", (1, 0), 10**6), "labels", (0, 3), -100)
    ValuesInRange(found.graph).require(batch, 0, "step 1")  # the first label is shifted away


def test_longer_samples_have_the_same_bounds() -> None:
    found = case("llama")
    batch = {name: torch.cat([tensor, tensor], 1) for name, tensor in found.batch.items()}
    values = ValuesInRange(found.graph)
    values.require(with_value(batch, "labels", (0, 0), -7), 0, "step 1")
    with pytest.raises(DataError, match="sample 2: labels holds -7"):
        values.require(with_value(batch, "labels", (2, 13), -7), 0, "step 1")


def test_narrow_integers_are_compared_with_bounds_that_they_cannot_hold() -> None:
    graph = capture(Wide(), {"tokens": torch.zeros(4, 6, dtype=torch.int8)})
    with pytest.raises(DataError, match=r"sample 1: tokens holds -1; .* has 300 rows"):
        ValuesInRange(graph).require({"tokens": torch.tensor([[5], [-1]], dtype=torch.int8)}, 0, "step 1")


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens.long()).mean()


class Pointer(nn.Module):
    """Its classes are the places of the sequence, so longer samples have more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 4)
        self.score = nn.Linear(4, 1)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.score(self.tokens(tokens.clamp(max=10)))[..., 0], target)


def test_classes_that_grow_with_the_samples_are_no_bound_for_longer_ones() -> None:
    graph = capture(
        Pointer(), {"tokens": torch.zeros(4, 6, dtype=torch.long), "target": torch.zeros(4, dtype=torch.long)}
    )
    assert {bound.field for bound in value_bounds(graph)} == {"target"}  # the tokens are clamped before
    values = ValuesInRange(graph)
    batch = {"tokens": torch.full((4, 9), 12), "target": torch.tensor([0, 8, 3, 2])}
    values.require(batch, 0, "step 1")
    with pytest.raises(DataError, match=r"sample 1: target holds 8; .* has 6 classes"):
        values.require({"tokens": batch["tokens"][:, :6], "target": batch["target"]}, 0, "step 1")


def test_a_source_is_looked_at_as_it_hands_out_samples() -> None:
    found = case("gpt")
    batch = with_value(found.batch, "input_ids", (3, 0), 99)

    class Source:
        size = 4

        def samples(self, first: int, count: int) -> dict[str, Tensor]:
            return {name: tensor[first : first + count] for name, tensor in batch.items()}

    source = ValuesInRange(found.graph).source(Source(), "step 5")
    assert source.samples(0, 3)["labels"].shape[0] == 3
    with pytest.raises(DataError, match="step 5, sample 3: input_ids holds 99"):
        source.samples(2, 2)


def test_empty_samples_are_told() -> None:
    found = case("gpt")
    with pytest.raises(DataError, match=r"step 2: input_ids is \[4, 0\], so its samples are empty"):
        ValuesInRange(found.graph).require({name: tensor[:, :0] for name, tensor in found.batch.items()}, 0, "step 2")
    with pytest.raises(CaptureError, match=r"'labels' of the example batch is \[4, 0\], so its samples are empty"):
        capture(found.module, {**found.batch, "labels": found.batch["labels"][:, :0]})
