"""Whether torch's generators gave the numbers that were expected of them, and no others.

What a model without a graph draws is known from the samples with which it was tried. With others it may go another way, to ops that draw
where none did, or that no mask of the samples stands in for. The state of a generator tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from heterodyne.errors import CaptureError
from heterodyne.runtime.exact.dropout import draw_call_number

__all__ = ["require_known_draws"]


@contextmanager
def require_known_draws(device: torch.device, calls: Callable[[], int]) -> Iterator[None]:
    """Raises CaptureError if inside other numbers were drawn than one for each of ``calls()`` (asked at the end)."""
    first, of_device = torch.get_rng_state(), _state_of(device)
    yield
    last = torch.get_rng_state()
    torch.set_rng_state(first)
    for _ in range(calls()):
        draw_call_number()
    if not torch.equal(torch.get_rng_state(), last) or not torch.equal(_state_of(device), of_device):
        raise CaptureError(
            "with these samples forward draws random numbers that it did not draw with the example batch, or that cannot be made to belong "
            "to the samples, so they would depend on the plan. Draw with torch.rand, randn, bernoulli or dropout, in every forward"
        )


def _state_of(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.empty(0)
    state: Tensor = torch.get_device_module(device).get_rng_state()
    return state
