"""Contractions of every form cost what torch counts for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from heterodyne.frontend import capture


class Op(nn.Module):
    """One contraction of the input with a weight; ``input_learns`` lets gradients flow to both."""

    def __init__(self, shape: tuple[int, ...], op: Callable[[Tensor, Tensor], Tensor], input_learns: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.shift = nn.Parameter(torch.zeros(1), requires_grad=input_learns)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x + self.shift, self.weight).mean()


OPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((3, 6, 4), (5, 4), F.linear),
    "linear of a vector a sample": ((3, 4), (5, 4), F.linear),
    "matmul": ((3, 6, 4), (4, 5), torch.matmul),
    "matmul of batches": ((3, 2, 6, 4), (2, 4, 5), torch.matmul),
    "matmul with a vector": ((3, 4), (4,), torch.matmul),
    "addmm": ((3, 4), (4, 5), lambda x, w: torch.addmm(torch.zeros(5), x, w)),
    "conv1d": ((3, 4, 9), (6, 4, 3), F.conv1d),
    "conv2d with a stride": ((3, 4, 9, 9), (6, 4, 3, 3), lambda x, w: F.conv2d(x, w, stride=2)),
    "conv2d with groups": ((3, 4, 9, 9), (6, 2, 3, 3), lambda x, w: F.conv2d(x, w, groups=2)),
    "conv3d": ((3, 2, 5, 5, 5), (4, 2, 3, 3, 3), F.conv3d),
    "transposed conv2d": ((3, 4, 5, 5), (4, 6, 3, 3), lambda x, w: F.conv_transpose2d(x, w, stride=2)),
    "einsum": ((3, 6, 4), (2, 4, 5), lambda x, w: torch.einsum("btk,hkm->bhtm", x, w)),
}


@pytest.mark.parametrize("input_learns", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_contractions(name: str, input_learns: bool) -> None:
    x_shape, w_shape, op = OPS[name]
    model = Op(w_shape, op, input_learns)
    graph = capture(model, (torch.zeros(x_shape),))
    with FlopCounterMode(display=False) as counter:
        loss = model(torch.zeros(x_shape))
        forward = counter.get_total_flops()
        loss.backward()
        backward = counter.get_total_flops() - forward
    if name == "matmul with a vector":
        forward = 2 * 3 * 4  # torch counts a product with a vector as nothing
    if name in ("matmul with a vector", "conv2d with groups"):
        backward = forward * (1 + input_learns)  # and forgets the groups in the gradient of the weight
    (contraction,) = [o for o in graph.ops if o.parameters == ("weight",)]
    assert contraction.flops_forward(3) == forward
    assert contraction.flops_backward(3) == backward


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_meet_each_weight_once_a_step(kind: type[nn.RNNBase], gates: int) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = kind(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0].mean()

    graph = capture(Recurrent(), (torch.zeros(3, 5, 4),))
    counted = graph.flops_forward()(3)
    assert counted >= 2 * 3 * 5 * gates * 6 * (4 + 6)


def test_moving_data_costs_nothing_and_an_element_one() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x * self.weight, x], dim=1).transpose(0, 1).relu().sum()

    ops = {op.target.split(".")[1]: op for op in capture(Moves(), (torch.zeros(3, 4),)).ops}
    assert {name: op.flops_forward(3) for name, op in ops.items()} == {
        "mul": 12, "cat": 0, "transpose": 0, "relu": 24, "sum": 24,
    }  # fmt: skip
