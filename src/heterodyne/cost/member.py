"""The cost of a sharded stage on one of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from heterodyne.cost.compute import Pass
from heterodyne.cost.recomputation import RecomputedPart
from heterodyne.cost.sharded_activations import ShardedActivations
from heterodyne.cost.sharded_stage import ShardedStageCost
from heterodyne.cost.stage import StageCosts
from heterodyne.graph.size import Size

__all__ = ["member_costs"]

Ops = tuple[int, int]
_TOGETHER: Final[tuple[Pass, ...]] = ("F", "B", "I")


def member_costs(
    kept: ShardedActivations,
    sizes: Sequence[int],
    own: Sequence[int],
    *,
    again: Sequence[RecomputedPart],
    entering: Size,
    leaving: Size,
    ranks: tuple[int, ...],
) -> StageCosts:
    """Of each micro-batch. F, B, I and R are collective; W is of this member alone, since it communicates nothing.

    Args:
        kept: the stage, and which of its members.
        sizes: samples of each micro-batch that all members work on; 0: they skip it.
        own: the samples of each that this member receives and sends.
        again: the recomputed parts of the stage.
        entering, leaving: bytes per sample that cross into the stage and out of it.
        ranks: of all members.
    """
    stage = kept.stage
    forward, backward, inputs = ([_together_s(stage, kind, size) for size in sizes] for kind in _TOGETHER)
    redone = [_total(_again_s(kept, size, part) for part in again) for size in sizes]
    made = {size: _bytes(kept, size, again) if size else _NOTHING for size in set(sizes)}
    crossing = [entering(count) + leaving(count) if count else 0.0 for count in own]

    def with_loss(tensors: float) -> int:
        return round(tensors) + kept.memory.lost(tensors)

    return StageCosts(
        forward_s=_column(forward, 0),
        backward_s=_column(backward, 0),
        input_s=_column(inputs, 0),
        weight_s=tuple(stage.alone_s(kept.member, "W", size) if size else 0.0 for size in sizes),
        recompute_s=_column(redone, 0),
        kept_bytes=tuple(with_loss(made[size].kept + more) for size, more in zip(sizes, crossing, strict=True)),
        recomputed_bytes=tuple(with_loss(made[size].dropped) for size in sizes),
        redone_bytes=tuple(with_loss(made[size].most_dropped) for size in sizes),
        weight_bytes=tuple(with_loss(made[size].left) for size in sizes),
        gradient_bytes=tuple(map(with_loss, crossing)),
        together=ranks,
        exchanges=StageCosts(
            forward_s=_column(forward, 1),
            backward_s=_column(backward, 1),
            input_s=_column(inputs, 1),
            weight_s=(0.0,) * len(sizes),
            recompute_s=_column(redone, 1),
        ),
    )


class _Bytes(NamedTuple):
    """``kept``: without what crosses; ``dropped``: what is computed again, ``most_dropped`` by one part; ``left``: for W."""

    kept: float
    dropped: float
    most_dropped: float
    left: float


_NOTHING: Final = _Bytes(0.0, 0.0, 0.0, 0.0)


def _together_s(stage: ShardedStageCost, kind: Pass, size: int, ops: Ops | None = None) -> tuple[float, float]:
    return stage.together_s(kind, size, ops) if size else (0.0, 0.0)


def _again_s(kept: ShardedActivations, size: int, part: RecomputedPart) -> tuple[float, float]:
    """Collectives are repeated too, whatever is kept, and there is no early stop."""
    stage = kept.stage
    together, exchanged = _together_s(stage, "F", size, part.ops)
    redone = part.redone(stage.graph, size, max(stage.balance), to_end=True) if size else 1.0
    return exchanged + redone * (together - exchanged), exchanged


def _bytes(kept: ShardedActivations, size: int, again: Sequence[RecomputedPart]) -> _Bytes:
    dropped = [kept.activations(size, part.ops) for part in again]
    inputs = sum(kept.read_from_before(size, part.ops) + kept.made_by(size, part) for part in again)
    return _Bytes(
        kept=max(0, kept.activations(size) - sum(dropped)) + inputs,
        dropped=sum(dropped),
        most_dropped=max(dropped, default=0),
        left=kept.between_halves(size),
    )


def _total(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first = second = 0.0
    for a, b in pairs:
        first, second = first + a, second + b
    return first, second


def _column(pairs: Sequence[tuple[float, float]], which: Literal[0, 1]) -> tuple[float, ...]:
    return tuple(pair[which] for pair in pairs)
