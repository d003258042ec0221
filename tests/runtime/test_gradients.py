"""Buckets: launched in order, while the backward goes on, with the gradients that autograd would have left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError
from heterodyne.plan.buckets import Bucket, BucketPart
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.comm.work import Work
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.weights.gradients import GradientBuckets

CPU = torch.device("cpu")


class Doubling(ProcessGroup):
    """Stands for two ranks with the same gradients; notes what is launched, and what autograd was doing then."""

    def __init__(self, log: list[str]) -> None:
        super().__init__((0, 1), None, device=torch.device("cpu"), via_host=False)
        self.log = log

    def all_reduce(self, tensor: Tensor, *, timed: bool = False) -> Work:
        self.log.append(f"reduce {tensor.numel()}")
        return Work(lambda: tensor.mul_(2))


class Chain(nn.Module):
    """Three layers, of 6, 4 and 2 elements, and one that nothing uses."""

    def __init__(self, log: list[str] | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3, bias=False)
        self.b = nn.Linear(3, 2, bias=False)
        self.c = nn.Linear(2, 1, bias=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.log = [] if log is None else log

    def forward(self, values: Tensor) -> Tensor:
        for name in "abc":
            values = getattr(self, name)(values)
            values.register_hook(lambda _, name=name: self.log.append(f"backward {name}"))
        return values.sum()


def buckets_of(names: list[tuple[str, ...]]) -> list[Bucket]:
    return [
        Bucket(index=i, parts=tuple(BucketPart(name=name) for name in own), bytes=0, blocks=(0,))
        for i, own in enumerate(names)
    ]


def gradients_of(model: nn.Module, names: list[tuple[str, ...]], process_group: ProcessGroup | None) -> GradientBuckets:
    recorder = Recorder(rank=0, device=CPU, on=False)
    everything = frozenset(name for own in names for name in own)
    buckets = [(bucket, process_group) for bucket in buckets_of(names)]
    found = GradientBuckets(dict(model.named_parameters()), buckets, recorder)
    found.expect(everything, {0: everything})
    return found


ORDER = [("c.weight",), ("b.weight",), ("a.weight",), ("unused",)]


def step(model: Chain, gradients: GradientBuckets, batches: list[Tensor]) -> None:
    gradients.begin()
    for index, batch in enumerate(batches):
        if index == len(batches) - 1:
            gradients.begin_last_backward(0)
        model(batch).backward()
    for index in range(len(ORDER)):
        gradients.launch(index)
    gradients.wait()


def test_buckets_leave_during_the_last_backward_in_their_order() -> None:
    log: list[str] = []
    model = Chain(log)
    gradients = gradients_of(model, ORDER, Doubling(log))
    batches = [torch.randn(4, 2), torch.randn(2, 2)]
    step(model, gradients, batches)
    backward = ["backward c", "backward b", "backward a"]
    assert log[:3] == backward
    assert [entry for entry in log[3:] if entry in backward] == backward
    reduced = [entry for entry in log if entry.startswith("reduce")]
    assert reduced == ["reduce 2", "reduce 6", "reduce 6", "reduce 5", "reduce 4"]  # the last: who has which gradient
    # The first leaves before the gradient of the first layer is known.
    assert log.index("reduce 2") < len(log) - 1 - log[::-1].index("backward a")


def test_a_bucket_waits_for_those_before_it() -> None:
    log: list[str] = []
    model = Chain(log)
    gradients = gradients_of(model, [("a.weight",), ("c.weight",), ("b.weight",)], Doubling(log))
    gradients.begin()
    gradients.begin_last_backward(0)
    model(torch.randn(4, 2)).backward()
    gradients.launch(2)
    assert log[-3:] == ["reduce 6", "reduce 2", "reduce 6"]
    assert log[:3] == ["backward c", "backward b", "backward a"]


@pytest.mark.tour("runtime/weights/")
@pytest.mark.parametrize("alone", [True, False])
def test_gradients_are_those_of_autograd(alone: bool) -> None:
    torch.manual_seed(0)
    model = Chain()
    batches = [torch.randn(4, 2), torch.randn(2, 2), torch.randn(1, 2)]
    sum(model(batch) for batch in batches).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    gradients = gradients_of(model, ORDER, None if alone else Doubling([]))
    for _ in range(2):  # nothing of a step is left for the next
        step(model, gradients, batches)
        for name, p in model.named_parameters():
            if name == "unused":
                assert p.grad is None  # as on one device: the optimizer leaves it alone
            else:
                torch.testing.assert_close(p.grad, expected[name] * (1 if alone else 2))


def test_a_rank_without_samples_sends_zeros() -> None:
    model = Chain()
    gradients = gradients_of(model, ORDER, Doubling([]))
    step(model, gradients, [torch.randn(4, 2)])
    step(model, gradients, [])
    assert all(not p.grad.any() for name, p in model.named_parameters() if name != "unused")


def test_a_gradient_that_comes_after_its_bucket_left_is_an_error() -> None:
    model = Chain()
    gradients = gradients_of(model, ORDER, Doubling([]))
    gradients.begin()
    gradients.begin_last_backward(0)
    model(torch.randn(4, 2)).backward()
    with pytest.raises(CaptureError, match=r"'c\.weight' came after its bucket was reduced"):
        model(torch.randn(4, 2)).backward()


def after_backward(loss: Tensor, gradients: GradientBuckets) -> None:
    loss.backward()
    gradients.wait()


@pytest.mark.parametrize("alone", [True, False])
def test_a_parameter_that_is_used_in_some_steps_only_is_an_error_where_all_go_the_same_way(alone: bool) -> None:
    """Its gradient would be thrown away, as that of one which the loss never reaches."""
    model = Chain()
    gradients = gradients_of(model, ORDER, None if alone else Doubling([]))
    step(model, gradients, [torch.randn(4, 2)])
    gradients.begin()
    gradients.begin_last_backward(0)
    with pytest.raises(CaptureError, match="'unused' got a gradient, which it had not in the first step"):
        after_backward(model(torch.randn(4, 2)) + model.unused.sum(), gradients)


@pytest.mark.parametrize("register", [Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
def test_hooks_on_gradients_would_see_parts_of_the_batch(register: Callable[..., object]) -> None:
    model = Chain()
    register(model.b.weight, lambda gradient: None)
    with pytest.raises(CaptureError, match=r"'b\.weight' has a hook on its gradient"):
        gradients_of(model, ORDER, None)
    model = Chain()
    gradients = gradients_of(model, ORDER, None)
    gradients.begin()
    register(model.b.weight, lambda gradient: None)  # after a step
    with pytest.raises(CaptureError, match=r"'b\.weight' has a hook on its gradient"):
        gradients.begin()


@pytest.mark.parametrize("alone", [True, False])
def test_sparse_gradients_are_refused_on_every_number_of_ranks(alone: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    gradients = gradients_of(model, [("0.weight",)], None if alone else Doubling([]))
    gradients.begin()
    with pytest.raises(CaptureError, match=r"'0\.weight' has a sparse gradient"):
        after_backward(model(torch.tensor([1, 2])).sum(), gradients)


def test_closing_takes_the_hooks_away() -> None:
    log: list[str] = []
    model = Chain(log)
    gradients = gradients_of(model, ORDER, Doubling(log))
    gradients.begin()
    gradients.begin_last_backward(0)
    gradients.close()
    model(torch.randn(4, 2)).backward()
    assert not [entry for entry in log if entry.startswith("reduce")]


def test_views_follow_the_strides_of_channels_last_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False)).to(memory_format=torch.channels_last)
    gradients = gradients_of(model, [("0.weight",)], Doubling([]))
    gradients.begin()
    gradients.begin_last_backward(0)
    model(torch.randn(2, 3, 5, 5)).sum().backward()
    (weight,) = model.parameters()
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_frozen_meanwhile_has_no_gradient_and_may_be_trained_again(alone: bool) -> None:
    model = Chain()
    gradients = gradients_of(model, ORDER, None if alone else Doubling(model.log))
    batch = torch.ones(2, 2)
    for trains in (False, True, False, True):
        model.b.weight.requires_grad_(trains)
        step(model, gradients, [batch, batch])
        assert (model.b.weight.grad is not None) == trains
        assert model.a.weight.grad is not None
        assert model.unused.grad is None
