"""Convolutions and pooling: samples and channels are free, and what is around a place is needed whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding.rule import LETTERS, Call, Rule, but_samples
from heterodyne.graph.size import Size

__all__ = ["CONVOLUTIONS"]


def _convolution(call: Call) -> Rule | None:
    """``nc...,oc...->no...``; with groups, channels are cut in whole groups."""
    rank = len(call.shape(0))
    spatial = "." * (len(call.shape(1)) - 2)
    if rank != len(spatial) + 2:
        return None
    groups = call.argument("groups")
    bias = ("o",) if isinstance(call.argument("bias"), Ref) else ()
    if groups == 1:
        return Rule(
            operands=(f"nc{spatial}", f"oc{spatial}", *bias),
            outputs=(f"no{spatial}",),
            summed="c",
            added=frozenset({2}),
            filled="co",
        )
    if not isinstance(groups, int):
        return None
    return Rule(
        operands=(f"no{spatial}", f"o.{spatial}", *bias),
        outputs=(f"no{spatial}",),
        units={"o": Size.of(groups)},
        filled="o",
    )


def _pooled(call: Call) -> Rule:
    """Each channel of each sample by itself; there may be no dim of samples."""
    spatial = {"1": 1, "2": 2, "3": 3}.get(call.op.kind[call.op.kind.index("pool") + 4], 2)
    own = LETTERS[: len(call.output) - spatial] + "." * spatial
    return Rule(operands=(own,), outputs=(own,) * len(call.op.outputs), filled=but_samples(own, spatial))


def _resized(call: Call) -> Rule:
    own = "nc" + "." * (len(call.output) - 2)
    return Rule(operands=(own,), outputs=(own,), filled="c")


_POOLS: Final = [f"{name}_pool{dims}d" for name in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)]

CONVOLUTIONS: Final[Mapping[str, Callable[[Call], Rule | None]]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(_POOLS, _pooled),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d", "upsample_nearest1d"), _resized),
}
