"""What a schedule costs, stage by stage: seconds of its work, bytes that it holds, and who reads from whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["Read", "StageBytes", "StageTimes", "blocked", "chain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Seconds that a stage takes for one micro-batch: F, I, W and R. A whole backward B takes I and W together.

    Where ``recompute_s`` is not 0 and the orders have no R for a micro-batch, its B (or its I) takes that much longer.
    """

    forward_s: float
    input_s: float
    weight_s: float
    recompute_s: float = 0.0

    @classmethod
    def halved(cls, *, forward_s: float, backward_s: float, recompute_s: float = 0.0) -> StageTimes:
        """Return times for a stage of which it is not known what the halves of a backward take. ``backward_s``: with what is recomputed in
        it.

        The gradients of the weights are taken to be half of the backward: a matrix product has two of its size there, dx = dy w' and
        dw = x' dy. What else there is (attention, norms) has hardly weights, so they are rather less.
        """
        half = (backward_s - recompute_s) / 2
        return cls(forward_s=forward_s, input_s=half, weight_s=half, recompute_s=recompute_s)

    @property
    def backward_s(self) -> float:
        """The whole backward, with what is recomputed in it."""
        return self.recompute_s + self.input_s + self.weight_s

    @property
    def total_s(self) -> float:
        """All work for one micro-batch."""
        return self.forward_s + self.input_s + self.weight_s + self.recompute_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Bytes that a stage holds of one micro-batch.

    Args:
        activation: all that its backward needs. B frees it.
        input_frees: of those, what I frees; W frees the rest.
        kept: what is held from F on, if less than ``activation``; the rest comes back with R.
    """

    activation: int
    input_frees: int = 0
    kept: int | None = None

    @property
    def again(self) -> int:
        """Return what R brings back."""
        return 0 if self.kept is None else self.activation - self.kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Stage ``reader`` reads what stage ``source``, an earlier one, makes.

    The seconds are those of the transfer, which stages on one place do not need. ``backward_s`` None: no gradient comes back.
    """

    source: int
    reader: int
    forward_s: float = 0.0
    backward_s: float | None = 0.0


def chain(stages: int, send_s: float = 0.0) -> Sequence[Read]:
    """Each stage reads from the one before it, and every transfer takes ``send_s``."""
    return tuple(
        Read(source=stage, reader=stage + 1, forward_s=send_s, backward_s=send_s) for stage in range(stages - 1)
    )


def blocked(stages: Sequence[StageTimes], sends: Sequence[float], *, duplex: bool = True) -> tuple[StageTimes, ...]:
    """Stages that compute nothing while a message of theirs is under way. ``sends``: seconds of a message between each two neighbours, the
    same both ways.

    A message holds both ends: each forward is followed by one to the next stage and preceded by one from the stage before, each backward
    the other way round. ``duplex``: neighbours exchange a forward's message and a backward's at once, so that what a stage receives costs
    it no more than what it sends (the batched isend and irecv of Megatron-LM's p2p_communication.py); else one after the other, and all
    count. While a pipeline fills, a message that is counted at both ends counts twice: that is an upper bound.
    """
    after, before = [*sends, 0.0], [0.0, *sends]
    return tuple(
        replace(
            stage,
            forward_s=stage.forward_s + onward + (0.0 if duplex else back),
            input_s=stage.input_s + back + (0.0 if duplex else onward),
        )
        for stage, onward, back in zip(stages, after, before, strict=True)
    )
