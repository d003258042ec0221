"""Tells the user, once, that many shapes of inputs are being captured, what that costs and how to have fewer."""

from __future__ import annotations

from collections.abc import Callable

from heterodyne.units import format_seconds

__all__ = ["NewShapes", "Shapes"]

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""The inputs by name, with their shapes but for the batch."""

_MANY = 4


class NewShapes:
    """Counts the captures that inputs of other shapes than the example's have caused.

    Args:
        example: the shapes that the model was captured with.
        most: of so many the stages are kept.
        say: takes the line for people.
    """

    def __init__(self, example: Shapes, most: int, say: Callable[[str], None]) -> None:
        self._example = dict(example)
        self._most = most
        self._say = say
        self._captures = 0
        self._seconds = 0.0

    def captured(self, shapes: Shapes, seconds: float) -> None:
        """The model was captured for these shapes, which took so long. Says so at the 4th capture, and when the first ones are dropped."""
        self._captures += 1
        self._seconds += seconds
        if self._captures == _MANY:
            what = f"each new shape is captured once, and the {self._most} latest are kept"
        elif self._captures == self._most:
            what = f"only the {self._most} latest are kept, so that those from before are captured again when they come back"
        else:
            return
        latest = ", ".join(f"{name} {list(shape)}" for name, shape in shapes if shape != self._example.get(name))
        self._say(
            f"the model was captured for {self._captures} shapes of inputs beside that of the example, in "
            f"{format_seconds(self._seconds)} together (the latest: {latest}). Under a plan that cuts the model {what}. Pad batches to a "
            "multiple of one length (collators of Transformers: pad_to_multiple_of=64), and few shapes come"
        )
