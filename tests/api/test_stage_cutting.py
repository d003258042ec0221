"""Stages for inputs of other shapes than the model was captured with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heterodyne.api.stage_cutting import StageCutter
from heterodyne.errors import DataError
from heterodyne.frontend import trace


class Model(nn.Module):
    """Another one for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids)
        if ids.shape[1] > 8:
            hidden = hidden * 2
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def ids(length: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 7, (3, length))}


def test_a_stage_of_another_length_gives_the_models_own_loss() -> None:
    model = Model()
    cutter = StageCutter(trace(model, ids(6)), model)
    for length in (6, 4, 4, 5):
        batch = ids(length)
        stage = cutter(0, len(cutter._captured.graph.ops), (0,), None if length == 6 else batch)
        result = stage.bind(model, torch.device("cpu"))(batch, {}, 3)["loss"]
        assert torch.equal(result, model(**batch))


def test_a_length_for_which_the_model_is_another_is_refused() -> None:
    model = Model()
    captured = trace(model, ids(6))
    with pytest.raises(DataError, match=r"ids \[12\].*pad the batches to one length"):
        StageCutter(captured, model)(0, len(captured.graph.ops), (0,), ids(12))


def test_weights_may_lie_in_parts_when_another_length_comes() -> None:
    """Of a split layer a device holds some rows, and under ZeRO-3 parameters have no memory of their own."""
    whole, model = Model(), Model()
    cutter = StageCutter(trace(model, ids(6)), model)
    model.head.weight.data = model.head.weight.data[:3]
    nothing = torch.full((), torch.nan)
    model.head.bias.data, model.tokens.weight.data = nothing.expand(7), nothing.expand(7, 4)
    batch = ids(4)
    stage = cutter(0, len(cutter._captured.graph.ops), (0,), batch)
    assert torch.equal(stage.bind(whole, torch.device("cpu"))(batch, {}, 3)["loss"], whole(**batch))
