"""What the backward of a module does and no graph of its forward shows: noted with its line, and no piece of such a graph is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from heterodyne.errors import CaptureError, NoGraphError, PlanError
from heterodyne.frontend import trace


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).pow(2).mean()


BATCH = {"x": torch.zeros(2, 4)}


def with_tensor_hook(h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: -gradient)
    return h


def plain(h: Tensor) -> Tensor:
    return h + (h.round() - h).detach()


def hooked(kind: str) -> Net:
    net = Net(plain)
    getattr(net.second, kind)(lambda *values: None)
    return net


class Checkpointed(Net):
    """BatchNorm in a part that is run once more in the backward, where it counts the batch again."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(self.norm, self.first(x), use_reentrant=False)).pow(2).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a custom function": (lambda: Net(Rounded.apply), "Rounded is an autograd.Function"),  # type: ignore[arg-type]
    "a hook on a tensor": (lambda: Net(with_tensor_hook), "forward calls Tensor.register_hook"),
    "a backward hook": (lambda: hooked("register_full_backward_hook"), "'second' has a backward hook"),
    "BatchNorm in a checkpoint": (Checkpointed, "BatchNorm in torch.utils.checkpoint counts its batch again"),
    "a backward pre-hook": (lambda: hooked("register_full_backward_pre_hook"), "'second' has a backward hook"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_only_the_module_does_is_noted_with_its_line(name: str) -> None:
    build, what = CASES[name]
    captured = trace(build(), BATCH)
    (found,) = captured.graph.module_only
    assert found.what.startswith(what)
    assert "test_module_only.py:" in found.source
    with pytest.raises(PlanError, match=r"only the module itself trains as it should: .*test_module_only.py"):
        captured.stage(0, 1, starts=[0])


def test_forward_hooks_and_what_is_detached_are_in_the_graph() -> None:
    net = Net(plain)
    plain_ops = [op.kind for op in trace(net, BATCH).graph.ops]
    net.first.register_forward_hook(lambda module, given, result: result.tanh())
    net.first.register_forward_pre_hook(lambda module, given: (given[0].sin(),))
    graph = trace(net, BATCH).graph
    assert not graph.module_only
    assert sorted(op.kind for op in graph.ops) == sorted([*plain_ops, "sin", "tanh"])


def test_a_checkpoint_whose_batchnorm_counts_nothing_is_in_the_graph() -> None:
    net = Checkpointed()
    net.norm.eval()
    assert not trace(net, BATCH).graph.module_only


def test_the_fingerprint_follows_what_is_noted_and_not_its_line() -> None:
    graphs = [trace(net, BATCH).graph for net in (Net(plain), hooked("register_full_backward_hook"))]
    assert graphs[0].fingerprint != graphs[1].fingerprint


def test_terms_with_denominators_of_their_own_need_the_graph() -> None:
    class Terms(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.sum() / (x > 0).sum()

    with pytest.raises(CaptureError, match=r"denominators of their own, and Rounded .*test_module_only.py:\d+"):
        trace(Terms(Rounded.apply), BATCH)  # type: ignore[arg-type]


def test_a_gradient_inside_forward_is_in_no_graph_and_leaves_the_module_as_it_is() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor, forces: Tensor) -> Tensor:
            x = x.requires_grad_()
            energy = self.energy(x).sum()
            (found,) = torch.autograd.grad(energy, x, create_graph=True)
            return (found + forces).pow(2).mean()

    with pytest.raises(NoGraphError, match=r"test_module_only.py:\d+: .*autograd.grad.*\n.*takes a gradient"):
        trace(Forces(), {"x": torch.zeros(2, 3), "forces": torch.zeros(2, 3)})


def test_a_trace_that_fails_inside_of_a_transform_leaves_it() -> None:
    class Jacobian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            jacobian = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.linear(row))))
            return jacobian(x).pow(2).mean()  # type: ignore[no-any-return]

    model, x = Jacobian(), torch.ones(2, 3)
    with pytest.raises(NoGraphError):
        trace(model, {"x": x})
    model(x).backward()
    assert model.linear.weight.grad is not None
