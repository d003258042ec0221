"""Random numbers that a forward takes from Python or numpy: a trace takes them once and for all, and each device would take its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from heterodyne.errors import CaptureError
from heterodyne.frontend.faults import line_now

__all__ = ["PythonDraws"]


class PythonDraws(TorchFunctionMode):
    """Sees, while a forward runs, after which line the generators of Python or numpy are other ones."""

    def __init__(self) -> None:
        super().__init__()
        self._first: object = None
        self._line: str | None = None

    def begin(self) -> None:
        """To be called before the mode is entered."""
        self._first = _state()

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._line is None and _state() != self._first:
            self._line = line_now()
        return func(*args, **(kwargs or {}))

    def refuse(self) -> None:
        """Raise CaptureError, with the first op after the draw, if any number was drawn."""
        if self._line is not None or _state() != self._first:
            place = f"{self._line}\n" if self._line else ""
            raise CaptureError(
                f"{place}forward draws random numbers from Python's random or from numpy, here or just before. A captured graph would keep "
                "the first draw for ever, and each micro-batch of each device would draw its own. Draw them for each sample with "
                "torch.rand(x.shape[0], ...), or in the data."
            )


def _state() -> object:
    name, keys, *rest = np.random.get_state(legacy=True)  # the one that models draw from
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest
