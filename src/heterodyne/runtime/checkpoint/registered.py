"""Objects of the script whose state is kept in checkpoints: schedulers, what deals batches, counters of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from heterodyne.errors import CheckpointError
from heterodyne.runtime.checkpoint.checkpoints import taken_from

__all__ = ["Registered"]


class Registered:
    """By name, objects with ``state_dict()`` and ``load_state_dict()``.

    A rescue writes the state after the last whole step while another one is under way. By then what deals batches has dealt that step's:
    its state counts as it was when the step before ended. A scheduler is stepped between two steps: its state counts as it was when the
    step began. Of other objects nobody knows, so with them there is no rescue.
    """

    def __init__(self) -> None:
        self._objects: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # states that were loaded before their object was here
        self._kept: dict[str, Any] = {}  # those of a rescue
        self._in_step = False

    def add(self, objects: Mapping[str, Any]) -> None:
        """Keep the state of these from now on; they take over what was loaded under their name. Raises CheckpointError."""
        for name, of in objects.items():
            lacks = [verb for verb in ("state_dict", "load_state_dict") if not callable(getattr(of, verb, None))]
            if lacks:
                raise CheckpointError(f"{name} is a {type(of).__name__}, which has no {lacks[0]}(): it cannot be kept")
            if self._objects.get(name, of) is not of:
                raise CheckpointError(f"{name} is registered already, with another object: take another name")
        self._objects |= objects
        for name in objects.keys() & self._waiting.keys():
            self._take(name, self._waiting.pop(name))
        self._keep(lambda _: True)

    def state(self) -> dict[str, Any]:
        """Return the state of each, as it is now."""
        return {name: of.state_dict() for name, of in self._objects.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Give each its state; what is not registered yet waits for its object. Raises CheckpointError."""
        self._waiting = dict(states)
        for name in self._objects.keys() & states.keys():
            self._take(name, self._waiting.pop(name))
        self._keep(lambda _: True)

    def begin(self) -> None:
        """Note that a step begins."""
        self._keep(_is_scheduler)
        self._in_step = True

    def end(self) -> None:
        """Note that a step has ended."""
        self._in_step = False
        self._keep(_deals)

    def after_last_step(self) -> dict[str, Any] | None:
        """Return the state of each after the last whole step; None where that is not known. From any thread."""
        of_all = self._objects.values()
        known = all(_deals(of) or (_is_scheduler(of) and self._in_step) for of in of_all)
        return dict(self._kept) if known else None

    def _keep(self, which: Callable[[Any], bool]) -> None:
        self._kept |= {name: copy.deepcopy(of.state_dict()) for name, of in self._objects.items() if which(of)}

    def _take(self, name: str, state: Any) -> None:
        with taken_from(f"it holds a state of {name}", "register the object that it was taken of under that name"):
            self._objects[name].load_state_dict(state)


def _is_scheduler(of: Any) -> bool:
    return isinstance(of, LRScheduler)


def _deals(of: Any) -> bool:
    return not _is_scheduler(of) and hasattr(of, "__iter__")
