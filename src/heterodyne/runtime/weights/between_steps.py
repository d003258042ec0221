"""What a loop does to weights between two steps: alike on every rank, and to none of which a device has a part.

Each replica of a weight is changed by the rank that holds it. Noise without a seed, or an ``if rank == 0``, makes others of them, each of
which would go on by itself. Of a weight in parts, what is computed of a part need not be the part of what is computed of the whole: a norm
is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from heterodyne.errors import PlanError
from heterodyne.plan.boxes import Box

__all__ = ["Sample", "WeightWatch", "byte_sum", "require_alike", "sample_of"]

Sample: TypeAlias = Mapping[tuple[str, Box], tuple[float, ...]]
"""Of each tensor, or box of it, that a rank holds, a few values spread over it, behind the error that they may have."""

_VALUES = 16
_ERROR = 1e-3  # of the largest: unlike devices round otherwise, which adds up to far less, but in 16 bits to a last bit


@torch.no_grad()
def sample_of(held: Mapping[tuple[str, Box], Tensor]) -> Sample:
    """Of what a rank holds, by name and box."""
    names, values, sizes, errors = [], [], [], []
    for name, tensor in held.items():
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, -(-flat.numel() // _VALUES))]
        names.append(name)
        sizes.append(some.numel())
        errors.append(max(_ERROR, 2 * torch.finfo(some.dtype).eps) if some.is_floating_point() else _ERROR)
        values.append((torch.view_as_real(some).sum(-1) if some.is_complex() else some).double())
    together = torch.cat(values).cpu() if values else torch.empty(0)
    return {
        name: (error, *of.tolist()) for name, error, of in zip(names, errors, torch.split(together, sizes), strict=True)
    }


def require_alike(samples: Sequence[Sample], step: int) -> None:
    """Raises PlanError, on every rank alike, if two ranks (``samples``, in their order) hold other values of one tensor."""
    first: dict[tuple[str, Box], tuple[int, tuple[float, ...]]] = {}
    for rank, sample in enumerate(samples):
        for key, values in sample.items():
            other, wanted = first.setdefault(key, (rank, values))
            bar = wanted[0] * max((abs(value) for value in wanted[1:]), default=0.0)
            # What is not a number in both is the same.
            if any(abs(a - b) > bar or (a == a) != (b == b) for a, b in zip(wanted[1:], values[1:], strict=True)):
                raise PlanError(
                    f"before step {step + 1} {key[0]!r} has other values on rank {rank} than on rank {other}, and each goes on from its "
                    "own. Change weights and buffers, and rates of the optimizer, alike on every rank that holds them: random numbers from "
                    "one seed, no 'if rank == 0' around the change, no rate that follows what one rank has measured"
                )


class WeightWatch:
    """Of the weights of which this rank holds a box, how a step has left them; and of those that are copies of what is updated.

    Args:
        parts: by name; copies: the same, of 16 bits or of an update on the host. What autograd counts of these is taken over
            (`runtime.weights.masters`), what is written through ``.data`` nothing counts.
    """

    def __init__(self, parts: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        self._parts = parts
        self._copies = {name: copy for name, copy in copies.items() if name not in parts}
        self._left: dict[str, tuple[int, int]] = {}
        self._bits: dict[str, Tensor] = {}

    def leave(self, *, look: bool) -> None:
        """What changes them from here on is the user. ``look``: their values are compared too, which ``.data`` keeps from being counted."""
        held = {**self._parts, **(self._copies if look else {})}
        self._left = {name: _counted(tensor) for name, tensor in held.items()}
        self._bits = {name: byte_sum(tensor) for name, tensor in held.items()} if look else {}

    def require_as_left(self) -> None:
        """Raises PlanError for one that was changed. Where values are compared, the host waits for the device once."""
        held = {**self._parts, **self._copies}
        same = {name: _counted(held[name]) == left for name, left in self._left.items()}
        written = _others(self._bits, {name: held[name] for name in self._bits if same[name]})
        changed = [name for name in self._parts if not same[name]] + [name for name in written if name in self._parts]
        if changed:
            raise PlanError(
                f"{changed[0]!r} was changed between two steps, and under this plan each device has a part of it: what the script, or the "
                "optimizer outside of its step, computes of a part need not be the part of what is computed of the whole. Change weights "
                "inside of 'with trainer.whole_weights()'"
            )
        if written:
            raise PlanError(
                f"{written[0]!r} was written to through .data between two steps, which nothing counts, and what this plan updates is a "
                "copy of it (in fp32, or in the memory of the host), from which it would be overwritten. Write to it in place without "
                ".data, under torch.no_grad()"
            )


def _counted(tensor: Tensor) -> tuple[int, int]:
    """Writes as autograd counts them, and the place."""
    return tensor._version, tensor.data_ptr()


@torch.no_grad()
def byte_sum(tensor: Tensor) -> Tensor:
    """Return the sum of all bytes of a tensor, which the host does not wait for."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64)


def _others(before: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> list[str]:
    """Those with another sum now."""
    if not held:
        return []
    unlike = torch.stack([before[name] != byte_sum(tensor) for name, tensor in held.items()])
    return [name for name, other in zip(held, unlike.tolist(), strict=True) if other]
