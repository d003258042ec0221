"""A loss that compares samples at the end of a pipeline, of parts that lie in another order than the samples of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from heterodyne.frontend import trace
from heterodyne.runtime.exact.exchange import SampleExchange
from heterodyne.runtime.stages.joint_loss import JointLoss


class Ranked(nn.Module):
    """A loss that depends on which sample is which, and compares all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        alike = (found @ found.T).softmax(-1)
        places = torch.arange(x.shape[0], dtype=x.dtype)
        return (alike * places[:, None]).square().mean() + alike.sum(0).square().sum()


@pytest.mark.parametrize("spans", [((0, 2), (3, 1), (4, 2), (2, 1)), ((0, 6),), ((0, 1), (1, 5))])
def test_samples_are_in_their_places(spans: Sequence[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    model, x = Ranked(), torch.randn(6, 3)
    captured = trace(model, {"x": x})
    loss = captured.loss_together(model, torch.device("cpu"), SampleExchange(None, 0))
    joint = JointLoss(0, loss, [spans])
    joint.begin(len(spans))
    made: list[dict[str, Tensor]] = []
    found = None
    for index, (first, size) in enumerate(spans):
        assert found is None, "it is known with the last part"
        own = x[first : first + size]
        features = model.layer(own)
        read = {name: features if name.startswith("linear") else features.T for name in loss.reads}
        values, found = joint.forward(index, {"x": own}, read, size)
        made.append(values)
    assert found is not None
    weight = 1 / len(spans)
    expected = model(x)
    torch.testing.assert_close(found * weight, expected)
    for index, values in enumerate(made):
        by_loss = joint.backward(index, weight)
        torch.autograd.backward([values[name] for name in by_loss], list(by_loss.values()))
    gradient, model.layer.weight.grad = model.layer.weight.grad, None
    expected.backward()
    torch.testing.assert_close(gradient, model.layer.weight.grad)
