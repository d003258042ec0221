"""Slices that are padded each to its own longest sample: right only where padding does not count."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import CaptureError, DataError
from heterodyne.frontend import trace
from heterodyne.frontend.opaque import opaque, read_count
from heterodyne.runtime.exact.later_batches import LaterBatches
from heterodyne.runtime.slices import as_source

LENGTHS = (2, 5, 3, 1, 4)


class Tagger(nn.Module):
    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.embedding, self.head, self.ignored = nn.Embedding(9, 4), nn.Linear(4, 9), ignored

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten(), ignore_index=self.ignored)


@dataclass
class Padded:
    """With zeros: to the longest of each slice, or all alike."""

    alike: bool
    size: int = len(LENGTHS)

    def samples(self, first: int, count: int) -> Mapping[str, Tensor]:
        rows = [torch.arange(1, 1 + length) for length in (*LENGTHS[first : first + count], *[5] * self.alike)]
        return {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True)[:count]}


@pytest.mark.parametrize(("ignored", "alike"), [(-100, False), (-100, True), (0, False)])
def test_a_loss_that_counts_padding_is_refused_where_slices_pad_by_themselves(ignored: int, alike: bool) -> None:
    torch.manual_seed(0)
    model, source = Tagger(ignored), Padded(alike)
    captured = trace(model, source.samples(0, 4))
    later = LaterBatches(
        model, captured.graph, captured.loss_count, buffers={}, device=torch.device("cpu"), precision="fp32"
    )
    refused = ignored != 0 and not alike
    with pytest.raises(DataError, match="depends on how far samples are padded") if refused else nullcontext():
        later.require_padding(source, [(0, 3), (3, 2)], 0)


class Spike(nn.Module):
    """Chooses once for all samples, by whether any of them is large."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.other if bool((x > 50).any()) else self.one)(x).pow(2).mean()


@pytest.mark.parametrize("place", [0, 4, 9, 10, 20, 21, 25])
def test_a_choice_for_a_whole_batch_is_found_wherever_the_sample_is(place: int) -> None:
    """The samples of the rank are in two micro-batches, between which lie those of another; one in the middle is looked at in time."""
    torch.manual_seed(0)
    model, x = Spike(), torch.rand(26, 2)
    own = [(0, 11), (20, 6)]
    count = read_count("samples")
    found = opaque(model, {"x": x}, reason="", loss=count.loss, count=count, random=False, batch_norm=False)
    later = LaterBatches(model, found.graph, found.loss_count, buffers={}, device=torch.device("cpu"), precision="fp32")
    source = as_source({"x": x}, found.graph)

    def look() -> None:
        for step in range(6):
            later.require(source, own, step)

    look()
    x[15] = 60  # of another rank
    look()
    x[15], x[place] = 0, 60
    with pytest.raises(CaptureError, match="do not add up to the whole: the loss of 8 of its samples"):
        look()
