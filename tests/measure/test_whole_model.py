"""Copies of a model for measuring and rehearsing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from heterodyne.measure.whole_model import WholeModel, without_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(2))
        self.embedding.weight.requires_grad_(False)


@pytest.mark.tour("model_copy.py")
def test_a_copy_without_weights_keeps_ties_and_what_is_trained_and_leaves_the_model_alone() -> None:
    model = Tied()
    bare = without_weights(model)
    assert isinstance(bare, Tied)
    assert bare.head.weight is bare.embedding.weight
    assert all(tensor.is_meta for tensor in (*bare.parameters(), *bare.buffers()))
    assert not bare.embedding.weight.requires_grad
    assert [n for n, _ in bare.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_the_empty_model_is_made_from_the_real_one_where_nobody_says_how() -> None:
    whole = WholeModel(
        build=lambda device: Tied().to(device), inputs=(), example={}, loss=lambda value: torch.zeros(())
    )
    assert all(parameter.is_meta for parameter in whole.empty().parameters())
