"""Outputs of modules as ops of a graph: recorded and edited where the model runs, and no matter to the graph without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterodyne as hd
from heterodyne.errors import PlanError
from heterodyne.graph.module_outputs import MODULE_OUTPUT, without_module_outputs
from heterodyne.module_outputs import OutputHook, edited, nested, recorded, result_of, tensors_in


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).relu_()) - y).square().mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(3, 4), "y": torch.randn(3, 2)}


@pytest.mark.tour("module_outputs.py")
def test_outputs_are_recorded_and_edited_where_the_model_runs() -> None:
    model = Model()
    plain = model.first(batch()["x"])
    model.first.register_forward_hook(OutputHook("first"))
    with recorded() as seen:
        loss = model(**batch())
    assert [(entry.key, entry.call) for entry in seen] == [("first", 0)]
    assert torch.equal(seen[0].value, plain)  # as it was returned, though it was written into since
    with edited({"first": lambda output: output * 0}), edited({"first": lambda output: output + 1}), recorded() as seen:
        other = model(**batch())
    assert torch.equal(seen[0].value, torch.ones(3, 8))  # the inner block comes last
    assert other != loss
    assert torch.equal(model(**batch()), loss)


def test_the_graph_without_them_is_that_of_the_model_without_hooks() -> None:
    model = Model()
    before = hd.capture(model, batch())
    for name in ("first", "second"):
        model.get_submodule(name).register_forward_hook(OutputHook(name))
    graph = hd.capture(model, batch())
    plain = without_module_outputs(graph)
    shown = [op for op in graph.ops if op.kind == MODULE_OUTPUT]
    assert [op.argument("key") for op in shown] == ["first", "second"]
    assert [op.samples for op in shown] == [(0,), (0,)]
    assert [(op.target, op.inputs, op.parameters) for op in plain.graph.ops] == [
        (op.target, op.inputs, op.parameters) for op in before.ops
    ]
    assert plain.before[-1] == len(before.ops)
    assert plain.graph.output == before.output


@dataclass
class Pair:
    left: Tensor
    right: object


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (torch.ones(2), torch.ones(2)),
        ((torch.ones(2), None, 3), (torch.ones(2), None, 3)),
        ([torch.zeros(1), {"a": torch.ones(1)}], (torch.zeros(1), {"a": torch.ones(1)})),
        (Pair(torch.ones(1), "x"), {"left": torch.ones(1), "right": "x"}),
        (Pair(torch.ones(1), object()), {"left": torch.ones(1), "right": None}),
    ],
)
def test_an_output_is_shown_as_tuples_and_dicts(output: object, shown: object) -> None:
    form, tensors = tensors_in(output)
    assert str(nested(form, tensors)) == str(shown)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda output: output[:, :1], r"float32 tensor of shape \[3, 1\] of a float32 tensor of shape \[3, 2\]"),
        (lambda output: output.half(), "a float16 tensor"),
        (lambda output: (output,), "a tuple of 1 where the module returns a float32 tensor"),
    ],
)
def test_an_edit_of_another_form_is_refused(edit: Any, said: str) -> None:
    form, (x,) = tensors_in(torch.ones(3, 2))
    with pytest.raises(PlanError, match=said):
        result_of(edit, x, form, 0, "blocks.1")
