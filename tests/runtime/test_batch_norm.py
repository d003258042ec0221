"""Which calls have their statistics taken over all ranks; that these are right is shown in `multiprocess/test_exactness.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heterodyne.runtime.exact.batch_norm import GlobalBatchNorm


class Twin:
    """A channel to another rank that has the same samples."""

    ranks = (0, 1)

    def all_reduce(self, tensor: Tensor) -> Twin:
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        pass


CALLS: dict[str, Callable[..., Tensor]] = {
    "functional": lambda x, mean, var, w, b: F.batch_norm(x, mean, var, w, b, training=True),
    "torch": lambda x, mean, var, w, b: torch.batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_way_to_call_it_is_served(name: str) -> None:
    x, w, b = torch.randn(5, 3, 2), torch.randn(3), torch.randn(3)
    mean, var = torch.zeros(3), torch.ones(3)
    process_group: Any = Twin()
    with GlobalBatchNorm(process_group):
        found = CALLS[name](x, mean, var, w, b)
    both = torch.cat([x, x])
    of_both = [torch.zeros(3), torch.ones(3)]
    torch.testing.assert_close(found, F.batch_norm(both, *of_both, w, b, training=True)[:5])
    torch.testing.assert_close([mean, var], of_both)


def test_a_second_derivative_is_refused() -> None:
    """It would be that of this rank alone."""
    process_group: Any = Twin()
    x = torch.randn(5, 3, requires_grad=True)
    with GlobalBatchNorm(process_group):
        found = F.batch_norm(x, None, None, training=True)
    (slope,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        slope.square().sum().backward()
