"""How a tensor is laid out on the devices of a stage, and what it takes to lay it out otherwise.

Four layouts are enough for forward and backward, since each says where the gradient is too. In the words of DTensor's placements:

    REPLICATE    Replicate, and so is its gradient
    COPY         Replicate, and its gradient Partial: each device has a part, and the parts add up (Megatron's copy to the region)
    PARTIAL      Partial (sum): each device has a part, and the parts add up; the gradient is Replicate
    sharded(d)   Shard(d): each device has a slice of dim d; its gradient is sharded alike

So a gradient is laid out as its tensor is, but that of a COPY as a PARTIAL and that of a PARTIAL as a COPY. Slices are contiguous, in the
order of the devices, and need not be equal. What each conversion exchanges is the table in `conversion`; Shoeybi et al., "Megatron-LM",
2019, section 3, has those between REPLICATE, COPY and PARTIAL (its operators f and g), Korthikanti et al., 2022, those with sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "COPY",
    "PARTIAL",
    "REPLICATE",
    "Collective",
    "Conversion",
    "Layout",
    "conversion",
    "reduced_at_once",
    "sharded",
]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """``kind`` and, of a shard, the dim, and by which of the stage's lists of shares it is cut."""

    kind: Literal["replicate", "copy", "partial", "shard"]
    dim: int = -1
    by: int = 0

    def __str__(self) -> str:
        return f"sharded({self.dim})" + "'" * self.by if self.kind == "shard" else self.kind


REPLICATE: Final = Layout("replicate")
COPY: Final = Layout("copy")
PARTIAL: Final = Layout("partial")


def sharded(dim: int, by: int = 0) -> Layout:
    """Slices of a dim, counted from 0."""
    return Layout("shard", dim, by)


@dataclass(frozen=True, slots=True)
class Conversion:
    """The collectives of a conversion, in the forward and in the backward; None: nothing is exchanged."""

    forward: Collective | None
    backward: Collective | None

    @property
    def meets(self) -> bool:
        """Return whether anything is exchanged."""
        return self.forward is not None or self.backward is not None


_FREE: Final = Conversion(None, None)
_BETWEEN: Final = {
    ("replicate", "copy"): Conversion(None, "all_reduce"),
    ("replicate", "partial"): _FREE,  # the first device keeps it, the others have zeros
    ("replicate", "shard"): Conversion(None, "all_gather"),
    ("copy", "replicate"): _FREE,  # of the gradients, which are alike, the first device's counts
    ("copy", "partial"): _FREE,
    ("copy", "shard"): _FREE,
    ("partial", "replicate"): Conversion("all_reduce", None),
    ("partial", "copy"): Conversion("all_reduce", "all_reduce"),
    ("partial", "shard"): Conversion("reduce_scatter", "all_gather"),
    ("shard", "replicate"): Conversion("all_gather", None),
    ("shard", "copy"): Conversion("all_gather", "reduce_scatter"),
    ("shard", "partial"): _FREE,  # each device's slice among zeros
    ("shard", "shard"): Conversion("all_to_all", "all_to_all"),
}


_SMALL_BYTES: Final = 2**16


def reduced_at_once(size_bytes: float, members: int) -> bool:
    """Return whether an all-reduce is one round, in which each sends all of it to everyone and adds up what comes. Else it is two: each
    adds up its part, and gives it to the others. The runtime does it so, and costs follow.
    """
    return members == 2 or size_bytes <= _SMALL_BYTES


def conversion(have: Layout, want: Layout, *, differentiable: bool = True) -> Conversion:
    """Return what is exchanged to lay a tensor out as ``want`` that is laid out as ``have``."""
    if have == want:
        return _FREE
    found = _BETWEEN[have.kind, want.kind]
    return found if differentiable else Conversion(found.forward, None)
