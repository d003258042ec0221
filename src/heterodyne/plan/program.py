"""The Program: one list of actions a rank, which the simulator and the runtime both obey.

An action is written ``{stage}{kind}{index}``, PyTorch's notation: ``0F3`` is the forward of micro-batch 3 on stage 0,
``0REDUCE_GRAD2`` the reduction of gradient bucket 2. Stages are counted within the pipeline of the rank, which may hold several. In an
asynchronous schedule ``0B-1`` is the backward of the last micro-batch of the batch before (see `heterodyne.plan.schedules.asynchronous`).

    F j        forward of micro-batch j
    B j        its whole backward; or in two halves: I j, the gradients of the stage's inputs, and W j, those of its weights
    R j        what the stage does not keep of micro-batch j is computed again, ahead of its backward
    OFFLOAD j  what the stage keeps of micro-batch j on the host is gone from the device; it began to leave inside of F
    RELOAD j   it begins to come back, all of it; without a RELOAD it comes inside of the backward, one block ahead of the other
    SEND_F j   what later stages read of micro-batch j leaves for other ranks;  RECV_F j: it has come
    SEND_B j   the gradients of what was received leave for the ranks it came from;  RECV_B j: they have come
    REDUCE_GRAD k, CLIP, STEP: of the rank as a whole, so their stage is always 0
    SCATTER k  in place of REDUCE_GRAD where state is sharded: each owner of bucket k gets the sums of its own range alone
    GATHER k   behind STEP: each owner gets the weights of bucket k that the others have updated
    nUNSHARD k where parameters are sharded: those of bucket k are gathered, for the (n + 1)-th time in this step
    nRESHARD k all of them but the own range are let go of

Sends, reductions and gathers are asynchronous: they stand in the list where they may be *started* at the latest, and nothing that follows
waits for them, except that CLIP and STEP wait for reductions, and the passes of a stage for each UNSHARD of what it reads. A reduction
starts as soon as the gradients of its bucket are complete, which is inside the backward before it. A receive waits until its message is
there; room for it is made long before. Copies between a device and its host run one after the other beside its passes: what follows
OFFLOAD waits until those of its micro-batch are over; for RELOAD nothing waits but its backward, for what it needs when it needs it, and
there must be room from RELOAD on. The other kinds occupy their rank from start to end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["COLLECTIVES", "REDUCTIONS", "Action", "ActionKind", "Program"]

ActionKind = Literal[
    "F", "B", "I", "W", "R", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD", "SCATTER", "CLIP", "STEP", "GATHER",
    "UNSHARD", "RESHARD", "OFFLOAD", "RELOAD",
]  # fmt: skip
REDUCTIONS: Final[tuple[ActionKind, ...]] = ("REDUCE_GRAD", "SCATTER")
COLLECTIVES: Final[tuple[ActionKind, ...]] = (*REDUCTIONS, "GATHER", "UNSHARD")
_KINDS: tuple[str, ...] = get_args(ActionKind)
_WITHOUT_INDEX = frozenset({"CLIP", "STEP"})
_ACTION = re.compile(r"^([0-9]+)([A-Z_]+?)([0-9]*)$")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """``index`` is the micro-batch, the bucket (REDUCE_GRAD, SCATTER, GATHER, UNSHARD, RESHARD), or None (CLIP, STEP).

    Actions of the rank as a whole have no stage: it is 0, or of UNSHARD and RESHARD how often that bucket was gathered before.

    >>> str(Action.parse("0F3"))
    '0F3'
    """

    stage: int
    kind: ActionKind
    index: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.index is None else self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of `str`, of actions of one batch. Raises ValueError."""
        match = _ACTION.match(text)
        if match is None or match[2] not in _KINDS or (match[2] in _WITHOUT_INDEX) == bool(match[3]):
            raise ValueError(
                f"{text!r} is not an action; write for example '0F3', '1SEND_B0', '0REDUCE_GRAD2' or '0STEP'"
            )
        kind: ActionKind = match[2]  # type: ignore[assignment]  # the test above narrows it
        return cls(int(match[1]), kind, int(match[3]) if match[3] else None)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The actions of one optimizer step, a list a rank; an empty list for an idle rank."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))
