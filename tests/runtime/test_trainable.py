"""A step that would train nothing is refused, as a backward of PyTorch is; a model may still be captured to be evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError
from heterodyne.frontend import capture
from heterodyne.runtime.weights.trainable import require_trained


class Net(nn.Module):
    def __init__(self, *, detached: bool, frozen: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.detached = detached
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layers(x).mean()
        return loss.detach() if self.detached else loss


@pytest.mark.parametrize(
    ("detached", "frozen", "told"),
    [(True, 0, "no gradient flows from the loss of Net"), (False, 2, "every parameter of Net is frozen")],
)
def test_a_step_that_trains_nothing_is_refused(detached: bool, frozen: int, told: str) -> None:
    graph = capture(Net(detached=detached, frozen=frozen), (torch.zeros(3, 4),))
    with pytest.raises(CaptureError, match=told):
        require_trained(graph)


def test_one_that_trains_some_weights_is_not() -> None:
    require_trained(capture(Net(detached=False, frozen=1), (torch.zeros(3, 4),)))


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Quantised(Net):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = Rounded.apply(self.layers(x)).mean()  # type: ignore[no-untyped-call]
        return loss.detach() if self.detached else loss


def test_no_grad_inside_of_a_custom_function_is_no_loss_without_gradients() -> None:
    require_trained(capture(Quantised(detached=False, frozen=0), (torch.zeros(3, 4),)))
    with pytest.raises(CaptureError, match="no gradient flows"):
        require_trained(capture(Quantised(detached=True, frozen=0), (torch.zeros(3, 4),)))
    hooked = Net(detached=True, frozen=0)
    hooked.layers[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="no gradient flows"):
        require_trained(capture(hooked, (torch.zeros(3, 4),)))
