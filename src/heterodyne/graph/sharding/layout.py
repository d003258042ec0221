"""How a tensor lies on the devices of a stage, and what it takes to lay it out otherwise.

Four layouts are enough for forward and backward, since each says where the gradient lies too:

    WHOLE    the same tensor on each device; so is its gradient
    COPY     the same tensor on each device; each has a part of its gradient, and the parts add up
    SUM      each device has a part, and the parts add up; the gradient is the same on each
    cut(d)   each device has a slice of dim d; its gradient is cut alike

So a gradient lies as its tensor does, but that of a COPY as a SUM and that of a SUM as a COPY. Slices are contiguous, in the order of the
devices, and need not be alike. What each conversion exchanges is the table in `conversion`; Shoeybi et al., "Megatron-LM", 2019,
section 3, has those between WHOLE, COPY and SUM (its operators f and g), Korthikanti et al., 2022, those with cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["COPY", "SUM", "WHOLE", "Collective", "Conversion", "Layout", "conversion", "cut", "reduced_at_once"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """``kind`` and, of a cut, the dim, and by which of the stage's lists of shares it is cut."""

    kind: Literal["whole", "copy", "sum", "cut"]
    dim: int = -1
    by: int = 0

    def __str__(self) -> str:
        return f"cut({self.dim})" + "'" * self.by if self.kind == "cut" else self.kind


WHOLE: Final = Layout("whole")
COPY: Final = Layout("copy")
SUM: Final = Layout("sum")


def cut(dim: int, by: int = 0) -> Layout:
    """Slices of a dim, counted from 0."""
    return Layout("cut", dim, by)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The collectives of a conversion, in the forward and in the backward; None: nothing is exchanged."""

    forward: Collective | None
    backward: Collective | None

    @property
    def meets(self) -> bool:
        """Whether anything is exchanged."""
        return self.forward is not None or self.backward is not None


_FREE: Final = Conversion(None, None)
_BETWEEN: Final = {
    ("whole", "copy"): Conversion(None, "all_reduce"),
    ("whole", "sum"): _FREE,  # the first device keeps it, the others have zeros
    ("whole", "cut"): Conversion(None, "all_gather"),
    ("copy", "whole"): _FREE,  # of the gradients, which are alike, the first device's counts
    ("copy", "sum"): _FREE,
    ("copy", "cut"): _FREE,
    ("sum", "whole"): Conversion("all_reduce", None),
    ("sum", "copy"): Conversion("all_reduce", "all_reduce"),
    ("sum", "cut"): Conversion("reduce_scatter", "all_gather"),
    ("cut", "whole"): Conversion("all_gather", None),
    ("cut", "copy"): Conversion("all_gather", "reduce_scatter"),
    ("cut", "sum"): _FREE,  # each device's slice among zeros
    ("cut", "cut"): Conversion("all_to_all", "all_to_all"),
}


_SMALL_BYTES: Final = 2**16


def reduced_at_once(size_bytes: float, members: int) -> bool:
    """Whether an all-reduce is one round, in which each sends all of it to everyone and adds up what comes. Else it is two: each adds up
    its part, and gives it to the others. The runtime does it so, and costs follow.
    """
    return members == 2 or size_bytes <= _SMALL_BYTES


def conversion(have: Layout, want: Layout, *, differentiable: bool = True) -> Conversion:
    """What is exchanged to lay a tensor out as ``want`` that lies as ``have``."""
    if have == want:
        return _FREE
    found = _BETWEEN[have.kind, want.kind]
    return found if differentiable else Conversion(found.forward, None)
