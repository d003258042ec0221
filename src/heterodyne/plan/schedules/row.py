"""The actions of one place, written down one after the other: each kind of work takes the next micro-batch of its stage."""

from __future__ import annotations

from collections import Counter, deque

from heterodyne.plan.program import Action

__all__ = ["Row"]


class Row:
    """A list in the making. Work on micro-batches beyond the last is counted but not written.

    So a schedule may be written as if there were enough micro-batches for its pattern: to leave all the work of some
    micro-batches out of orders that can run leaves orders that can run.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._actions: list[Action] = []
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self._weights: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._write(Action(stage, "F", self._forwards[stage]))
        self._forwards[stage] += 1

    def backward(self, stage: int) -> None:
        """The whole backward."""
        self._write(Action(stage, "B", self._backwards[stage]))
        self._backwards[stage] += 1

    def input(self, stage: int) -> None:
        """The first half of the backward; the second half is owed."""
        index = self._backwards[stage]
        self._write(Action(stage, "I", index))
        self._weights.append(Action(stage, "W", index))
        self._backwards[stage] += 1

    def weight(self, stage: int | None = None) -> None:
        """The second half that has been owed for longest, of one stage or of any; nothing if none is owed."""
        owed = next((action for action in self._weights if stage in (None, action.stage)), None)
        if owed is not None:
            self._weights.remove(owed)
            self._write(owed)

    def weights(self, stage: int | None = None) -> None:
        """All second halves that are owed."""
        for _ in range(len(self._weights)):
            self.weight(stage)

    @property
    def owed(self) -> int:
        return len(self._weights)

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(self._actions)

    def _write(self, action: Action) -> None:
        if action.index is not None and action.index < self._micro_batches:
            self._actions.append(action)
