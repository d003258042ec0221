"""What an optimizer is given in the place of a parameter is updated as the parameter itself would be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from heterodyne.runtime.weights.left import Left
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.optimizer import optimizer_of

STEPS = 3
Parameters = dict[str, nn.Parameter]


def made() -> Parameters:
    """One as it lies, one transposed, one whose channels come last."""
    torch.manual_seed(0)
    return {
        "rows": nn.Parameter(torch.randn(4, 6)),
        "columns": nn.Parameter(torch.randn(6, 4).t()),
        "images": nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    }


def gradients(seed: int) -> dict[str, Tensor]:
    """Row after row, as a flat bucket has them."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) for name, p in made().items()}


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def clamped(parameters: Parameters) -> None:
    with torch.no_grad():
        for p in parameters.values():
            p.clamp_(-0.5, 0.5)


def replaced(parameters: Parameters) -> None:
    """As the shadows of an average are put in the place of weights, and these back."""
    for p in parameters.values():
        p.data = p.data * 0.5


def trained(masters: MasterWeights | None, between: Callable[[Parameters], None], parameters: Parameters) -> None:
    held = parameters if masters is None else masters.updated
    optimizer = optimizer_of(fused, held)
    for step in range(STEPS):
        between(parameters)
        for name, gradient in gradients(step).items():
            # On one device autograd's own, which has the strides of the parameter.
            parameters[name].grad = torch.empty_like(parameters[name]).copy_(gradient) if masters is None else gradient
        if masters is None:
            optimizer.step()
        else:
            masters.step(optimizer)
            masters.settled()


@pytest.mark.parametrize(
    "between", [lambda _: None, clamped, replaced], ids=["alone", "clamped by the user", "replaced by the user"]
)
@pytest.mark.parametrize("where", ["device", "host", "ranges"])
def test_weights_go_where_they_go_by_themselves(between: Callable[[Parameters], None], where: str) -> None:
    expected = made()
    trained(None, between, expected)
    for low, high in [(0, 7), (7, 24)] if where == "ranges" else [(0, None)]:
        found = made()
        ranges = {} if high is None else dict.fromkeys(found, (low, high))
        trained(MasterWeights(found, ranges, on_host=where == "host"), between, found)
        for name, p in expected.items():
            own, wanted = (whole.reshape(-1)[low:high] for whole in (found[name], p))
            torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-7)


def test_masters_keep_their_bits_unless_the_user_changes_the_weight() -> None:
    parameters = {"a": nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))}
    masters = MasterWeights(parameters)
    optimizer = torch.optim.SGD(masters.updated.values(), lr=1.0)
    for _ in range(4):  # a 512th each: one alone is lost in bf16
        parameters["a"].grad = torch.full((2,), -(2.0**-9))
        masters.step(optimizer)
        masters.settled()
    assert masters.masters["a"].tolist() == [1 + 2**-7, 2 + 2**-7]
    with torch.no_grad():
        parameters["a"].fill_(3.0)
    parameters["a"].grad = torch.zeros(2)
    masters.step(optimizer)
    assert masters.masters["a"].tolist() == [3.0, 3.0]
    masters.close()


def test_a_master_takes_values_that_the_weight_cannot_hold() -> None:
    """Of a range of a weight, too: what comes from elsewhere in fp32 is not rounded on its way to what is updated."""
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    for ranges, own in (({}, slice(0, 8)), ({"weight": (2, 5)}, slice(2, 5))):
        masters = MasterWeights({"weight": weight}, ranges)
        with torch.no_grad(), masters.lent():
            value = 1 + torch.arange(8.0).view(4, 2) / 1000
            weight.copy_(value)
            masters.take({"weight": value, "another": value})
        assert torch.equal(masters.updated["weight"].reshape(-1), value.reshape(-1)[own])
        masters.step(torch.optim.SGD(masters.updated.values(), lr=1.0))
        assert torch.equal(masters.updated["weight"].reshape(-1), value.reshape(-1)[own]), "nobody has changed it since"
        masters.close()


def test_a_master_that_is_moved_outside_of_a_step_is_given_to_the_model() -> None:
    parameters = {"a": nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))}
    masters = MasterWeights(parameters)
    left, optimizer = Left(masters.apart), torch.optim.SGD(masters.updated.values(), lr=1.0)
    masters.updated["a"].data.add_(1 + 2.0**-10)  # nothing counts it
    assert not left.is_counted()
    assert left.changed() == ["a"]
    assert masters.give(["a"]) is None
    assert parameters["a"].tolist() == [2.0, 3.0]
    parameters["a"].grad = torch.zeros(2)
    masters.step(optimizer)
    assert masters.masters["a"].tolist() == [2 + 2.0**-10, 3 + 2.0**-10], "its bits are kept"
    masters.settled()
    with torch.no_grad():
        parameters["a"].fill_(5.0)
        masters.updated["a"].fill_(7.0)
    assert "has moved 'a' outside of its step, and the script has written to it" in str(masters.give(["a"]))
    masters.close()
