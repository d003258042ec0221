"""Parameters of which a rank keeps a part, between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters, require_no_write


def test_values_that_nobody_would_read_are_refused() -> None:
    bucket: Any = Mock(index=0, parameters=("w",))
    sharded = ShardedParameters([(bucket, Mock())], {0: [(0, 2), (2, 6)]}, {}, {"w": (0, 2)}, torch.device("cpu"))
    parameters = {"w": nn.Parameter(torch.randn(2, 3))}
    parameters["w"].data = sharded.keep("w", parameters["w"].data)
    sharded.require_untouched(parameters)
    parameters["w"].data = parameters["w"].data * 0.9
    with pytest.raises(PlanError, match="'w' was given other values"):
        sharded.require_untouched(parameters)


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((2, 3), lambda p: p.zero_()),
        ((2, 3), lambda p: p[0].fill_(1.0)),
        ((), lambda p: p.data.clamp_(max=4.6)),
        ((1,), lambda p: p.mul_(0.9)),
        ((), lambda p: setattr(p, "data", p.data.clamp(max=4.6))),
    ],
)
def test_what_torch_lets_be_written_is_seen(shape: tuple[int, ...], change: Callable[[nn.Parameter], object]) -> None:
    bucket: Any = Mock(index=0, parameters=("w",))
    sharded = ShardedParameters([(bucket, Mock())], {0: [(0, 1), (1, 6)]}, {}, {"w": (0, 1)}, torch.device("cpu"))
    parameter = nn.Parameter(torch.randn(shape))
    parameter.data = sharded.keep("w", parameter.data)
    sharded.require_untouched({"w": parameter})
    with torch.no_grad():
        change(parameter)
    with pytest.raises(PlanError, match="between two steps"):
        sharded.require_untouched({"w": parameter})


@pytest.mark.parametrize("change", [lambda p: p.clamp_(-1, 1), lambda p: p.data.mul_(0.9), lambda p: p[0].add_(1)])
def test_a_write_that_torch_refuses_is_told_with_its_line(change: Callable[[nn.Parameter], object]) -> None:
    bucket: Any = Mock(index=0, parameters=("w",))
    sharded = ShardedParameters([(bucket, Mock())], {0: [(0, 2), (2, 6)]}, {}, {"w": (0, 2)}, torch.device("cpu"))
    parameter = nn.Parameter(torch.randn(2, 3))
    parameter.data = sharded.keep("w", parameter.data)
    with torch.no_grad(), pytest.raises(RuntimeError) as refused:
        change(parameter)
    with pytest.raises(
        PlanError, match=r"test_sharded_parameters.py:\d+: .*_\(.*\n.*in place between two steps.*'zero': 2"
    ):
        require_no_write(refused.value)
    require_no_write(ValueError("another"))
    require_no_write(None)
