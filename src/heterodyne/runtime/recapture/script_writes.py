"""What the script has written between two steps: to weights that every rank holds whole, and as options of the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from heterodyne.runtime.recapture.read_state import Change
from heterodyne.runtime.same_batch import is_looked_at
from heterodyne.runtime.weights.left import Left

__all__ = ["ScriptWrites"]


class ScriptWrites:
    """Of one rank, as `Left` tells it: without values where the host would wait for a device.

    Args:
        whole: returns the parameters and buffers that every rank holds whole, by name.
        moved: those that one rank's optimizer may write to outside of its step, and another's not.
    """

    def __init__(
        self,
        whole: Callable[[], Mapping[str, Tensor]],
        moved: Collection[str],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._find_whole = whole
        self._written: list[str] = []  # before the latest step
        self._pending: dict[str, None] = {}  # weights that the script had written to when the runtime did
        self._moved = moved
        self._optimizer = optimizer
        self.found: list[Change] = []
        """Of weights and options, before the latest step."""
        self.state: list[Change] | None = None
        """Of the optimizer's state, which ranks have of their own weights; None: this rank has none."""
        self.find_weights()
        self.leave()

    def leave(self) -> None:
        """From here on whatever writes to weights and options is the script."""
        self._pending.clear()
        self._options = _options(self._optimizer)
        self._versions = _versions(self._optimizer)
        self._left.leave()

    def find_weights(self) -> None:
        """Buffers are others than before."""
        whole = self._find_whole()
        self._left = Left(whole, values=all(tensor.device.type == "cpu" for tensor in whole.values()))

    @contextmanager
    def excepted(self) -> Iterator[None]:
        """What writes to weights and state inside is the runtime: it brings ranks that do not train up to date."""
        pending, same = dict.fromkeys(self._names()), self._versions == _versions(self._optimizer)
        try:
            yield
        finally:
            self._left.leave()
            self._pending = pending
            self._versions = _versions(self._optimizer) if same else [(0, -1)]

    def find(self, step: int) -> bool:
        """Find what was written before this step. Return whether values are to be compared with other ranks: as soon as other weights are
        written to than before, then now and then."""
        written = self._names()
        look = bool(written) and (written != self._written or is_looked_at(step))
        self.found = [*self._options_changed(), *(_written(name) for name in written if name not in self._moved)]
        self._written = written
        if self._versions:
            same = self._versions == _versions(self._optimizer)
            self.state = (
                []
                if same
                else [Change(name="the optimizer's state", before="as the last step left it", after="another")]
            )
        return look

    def _names(self) -> list[str]:
        return sorted({*self._pending, *self._left.changed()})

    def _options_changed(self) -> list[Change]:
        now, left = _options(self._optimizer), self._options
        return [
            Change(name=f"the optimizer's {name!r}", before=repr(left.get(name)), after=repr(now.get(name)))
            for name in (now.keys() | left.keys() if now != left else ())
            if now.get(name) != left.get(name)
        ]


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the numbers among the options of each group."""
    return {
        f"{key} of group {number}": value
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple)
    }


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return which tensors are its state, and how often each was written to; on a device the latest step may still be writing."""
    found = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [(id(tensor), tensor._version if tensor.device.type == "cpu" else 0) for tensor in found]


def _written(name: str) -> Change:
    return Change(name=repr(name), before="as the last step left it", after="written to")
