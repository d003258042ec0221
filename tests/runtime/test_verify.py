"""The comparison that proves law 1 must itself find what is wrong."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from heterodyne.plan.placement import Placement
from heterodyne.runtime.exact.verify import compare, one_device_gradients
from multiprocess.models import build, captured
from multiprocess.work import cluster_of, plan_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpt", "llama", "sum"])
def test_the_reference_is_plain_pytorch_bit_for_bit(name: str) -> None:
    case = build(captured(name), 5)
    plain = copy.deepcopy(case.module)
    output = plain(**case.batch)
    loss_of_plain = output if isinstance(output, torch.Tensor) else output[0]
    loss_of_plain.backward()
    cluster = cluster_of(2)
    loss, gradients = one_device_gradients(
        case.module,
        case.batch,
        graph=case.graph,
        placement=Placement.of(plan_of(case.graph, cluster, ((3,), (2,))), cluster),
        device=CPU,
        precision="fp32",
        loss_count=case.count,
        seed=0,
    )
    assert loss == loss_of_plain.item()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[n], value) for n, value in expected.items())
    assert all(p.grad is None for p in case.module.parameters())


def test_errors_are_relative_to_each_gradient_and_the_largest_comes_first() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([100.0]), "c": torch.tensor([1.0])}
    found = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([101.0]), "c": torch.tensor([1.0])}
    compared = compare(2.0, found, 2.5, reference)
    assert compared.loss == pytest.approx(0.2)
    assert compared.gradients == (("a", pytest.approx(0.1)), ("b", pytest.approx(0.01)), ("c", 0.0))
    assert compared.largest == pytest.approx(0.2)


def test_a_gradient_that_is_zero_up_to_rounding_is_measured_by_all_of_them() -> None:
    reference = {"a": torch.tensor([1.0]), "b": torch.tensor([1e-9])}
    assert compare(1.0, {"a": torch.tensor([1.0]), "b": torch.tensor([-1e-9])}, 1.0, reference).largest < 1e-8
    assert compare(1.0, {"a": torch.tensor([1.0]), "b": torch.tensor([1e-3])}, 1.0, reference).largest > 9e-4


def test_a_gradient_that_one_side_lacks_is_wrong_unless_it_is_zero() -> None:
    whole = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    part = {"a": torch.tensor([1.0])}
    assert compare(1.0, part, 1.0, whole).largest == pytest.approx(1.0)
    assert compare(1.0, whole, 1.0, part).largest > 1.0
    assert compare(1.0, part, 1.0, part | {"b": torch.zeros(1)}).largest == 0.0


def test_not_a_number_is_the_worst() -> None:
    reference = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    compared = compare(1.0, reference | {"b": torch.tensor([math.nan])}, 1.0, reference)
    assert compared.gradients[0][0] == "b"
    assert not compared.largest <= 1e-5
