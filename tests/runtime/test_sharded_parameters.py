"""Parameters of which a rank keeps a part, between steps."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.sharded_parameters import ShardedParameters


def test_values_that_nobody_would_read_are_refused() -> None:
    bucket: Any = Mock(index=0, parameters=("w",))
    sharded = ShardedParameters([(bucket, Mock())], {0: [(0, 2), (2, 6)]}, {}, {"w": (0, 2)}, torch.device("cpu"))
    parameters = {"w": nn.Parameter(torch.randn(2, 3))}
    parameters["w"].data = sharded.keep("w", parameters["w"].data)
    sharded.require_untouched(parameters)
    parameters["w"].data = parameters["w"].data * 0.9
    with pytest.raises(PlanError, match="'w' was given other values"):
        sharded.require_untouched(parameters)
