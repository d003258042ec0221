"""Parameters of which a rank keeps a part, between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters


def _bound(shape: tuple[int, ...]) -> tuple[ShardedParameters, dict[str, nn.Parameter]]:
    """All is kept here, between steps: v, w of a shape, and one of another dtype."""
    parameters = {
        "v": nn.Parameter(torch.randn(4)),
        "w": nn.Parameter(torch.full(shape, 5.0)),
        "half": nn.Parameter(torch.randn(3).half()),
    }
    slices = {name: (0, parameter.numel()) for name, parameter in parameters.items()}
    buckets: list[Any] = [(Mock(index=0, parameters=("v", "w")), Mock()), (Mock(index=1, parameters=("half",)), Mock())]
    sharded = ShardedParameters(buckets, {0: [(0, 9)], 1: [(0, 3)]}, {}, slices, torch.device("cpu"))
    for name, parameter in parameters.items():
        parameter.data = sharded.keep(name, parameter.data)
    sharded.bind(parameters)
    sharded.require_untouched()
    return sharded, parameters


@pytest.mark.parametrize(
    ("shape", "write"),
    [
        ((2, 3), lambda w: setattr(w, "data", torch.ones(2, 3))),
        ((2, 3), nn.init.zeros_),
        ((2, 3), lambda w: w.data.fill_(0.5)),
        ((1,), lambda w: setattr(w, "data", torch.ones(1))),
        ((), lambda w: setattr(w, "data", w.data.clamp(max=4.6))),
    ],
)
def test_values_that_nobody_would_read_are_refused(
    shape: tuple[int, ...], write: Callable[[nn.Parameter], object]
) -> None:
    sharded, parameters = _bound(shape)
    write(parameters["w"])
    with pytest.raises(PlanError, match="'w' was given other values"):
        sharded.require_untouched()


@pytest.mark.parametrize("narrow", [False, True])
def test_a_single_element_may_be_written_where_it_is_kept(narrow: bool) -> None:
    """As a temperature is clamped after each step; the update goes on from there, also that of an fp32 copy."""
    sharded, parameters = _bound((1,))
    of = parameters["w"].bfloat16() if narrow else parameters["w"]
    if narrow:
        sharded.own["w"] = of.data = torch.tensor([5.0], dtype=torch.bfloat16)
        of = nn.Parameter(of.data)
    masters = MasterWeights({"w": of}, shards={"w": sharded.own["w"]})
    of.data.clamp_(max=4.5)
    sharded.require_untouched()
    masters.own_gradients["w"] = torch.ones(1)
    masters.step(torch.optim.SGD(masters.updated.values(), lr=0.5))
    assert sharded.own["w"].item() == 4.0
