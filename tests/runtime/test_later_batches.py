"""Slices that are padded each to its own longest sample: right only where padding does not count."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.errors import DataError
from heterodyne.frontend import trace
from heterodyne.runtime.exact.later_batches import LaterBatches

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
    later = LaterBatches(model, captured.graph, captured.loss_count, device=torch.device("cpu"), precision="fp32")
    refused = ignored != 0 and not alike
    with pytest.raises(DataError, match="depends on how far samples are padded") if refused else nullcontext():
        later.require_padding(source, [(0, 3), (3, 2)], 0)
