"""The Program: one list of actions a rank, which the simulator and the runtime both obey.

An action is written ``{stage}{kind}{index}``, PyTorch's notation: ``0F3`` is the forward of micro-batch 3 on stage 0,
``0REDUCE_GRAD2`` the reduction of gradient bucket 2. Kinds of one action a step have no index: ``0CLIP``, ``0STEP``.

``REDUCE_GRAD`` is asynchronous: it stands in the list where it may be *started* at the latest. It starts as soon as the
gradients of its bucket are complete, which is inside the backward before it (the last one of that stage); everything that
follows ``CLIP`` or ``STEP`` waits for it. The other kinds occupy their rank from start to end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Action", "ActionKind", "Program"]

ActionKind = Literal["F", "B", "REDUCE_GRAD", "CLIP", "STEP"]
_KINDS: tuple[str, ...] = get_args(ActionKind)
_INDEXED = frozenset({"F", "B", "REDUCE_GRAD"})
_ACTION = re.compile(r"^([0-9]+)([A-Z_]+?)([0-9]*)$")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """``index`` is the micro-batch (F, B), the bucket (REDUCE_GRAD), or None.

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
        """The inverse of `str`. Raises ValueError."""
        match = _ACTION.match(text)
        if match is None or match[2] not in _KINDS or (match[2] in _INDEXED) != bool(match[3]):
            raise ValueError(f"{text!r} is not an action; write for example '0F3', '0REDUCE_GRAD2' or '0STEP'")
        kind: ActionKind = match[2]  # type: ignore[assignment]  # the test above narrows it
        return cls(int(match[1]), kind, int(match[3]) if match[3] else None)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The actions of one optimizer step, a list a rank; an empty list for an idle rank."""

    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, actions))}" for rank, actions in enumerate(self.ranks))
