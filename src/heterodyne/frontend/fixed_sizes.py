"""Where a model compares its batch size with a number: the trace then holds for some sizes of a batch and not for others."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.printers import PythonPrinter

from heterodyne.errors import CaptureError
from heterodyne.frontend.faults import is_foreign, line_now

__all__ = ["SizeWatch", "refuse_choices_by_size"]

_SIZES_AT_LEAST = 64


class SizeWatch(TorchFunctionMode):
    """Notes, while a forward is traced, the line that calls an op of torch in which a size is compared with a number."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: list[ShapeEnv] = []
        self._seen = 0
        self._line = ""

    def begin(self, shapes: ShapeEnv) -> None:
        """Tell where the trace notes what it assumes of sizes. To be called before the mode is entered."""
        if shapes not in self._shapes:
            self._shapes.append(shapes)
        self._seen = self._count()

    @property
    def line(self) -> str | None:
        """The line that made the trace hold for one size, with path and text; None if none did."""
        for guard in (guard for shapes in self._shapes for guard in shapes.guards):
            place = guard.sloc.framework_loc
            if (
                isinstance(guard.expr, sympy.Eq)
                and isinstance(place, traceback.FrameSummary)
                and not is_foreign(place.filename)
            ):
                return f"{place.filename}:{place.lineno}: {place.line}"
        return self._line or None

    def __torch_function__(  # type: ignore[no-untyped-def]  # as torch declares it
        self, func, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        finally:
            if self._count() > self._seen:
                self._seen = self._count()
                self._line = self._line or line_now(installed=True)

    def _count(self) -> int:
        guards = (guard.expr for shapes in self._shapes for guard in shapes.guards)
        return sum(isinstance(expr, sympy.Eq) and any(side.is_number for side in expr.args) for expr in guards)


def refuse_choices_by_size(graph: fx.Graph, samples: int) -> None:
    """Raise CaptureError, with the line, if forward chooses by the number of samples (``if len(x) % 2``).

    A device has a part of the samples, so it would choose otherwise than one device with all of them. ``samples``: of the example.
    """
    for shapes in _shapes_of(graph):
        for guard in shapes.guards:
            if not _holds(guard.expr, max(samples, _SIZES_AT_LEAST)) and (line := _own_line(guard.sloc)):
                raise CaptureError(
                    f"{line}\nforward chooses by the number of samples: it was traced where {_in_words(guard.expr)}. Each device has "
                    "some of the samples, in micro-batches of several sizes, and would choose otherwise than one device with all of "
                    "them. Do the same for every number of samples, or choose by a constant that the model is given when it is built."
                )


def _shapes_of(graph: fx.Graph) -> list[ShapeEnv]:
    """What the trace of a graph assumes of sizes."""
    found: dict[int, ShapeEnv] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes: list[Any] = (
            [size for size in value.shape if not isinstance(size, int)] if isinstance(value, Tensor) else []
        )
        found |= {id(size.node.shape_env): size.node.shape_env for size in sizes}
    return list(found.values())


def _holds(guard: sympy.Basic, largest: int) -> bool:
    """Whether an assumption on the one size that is not fixed holds for all numbers of samples from 2 up (1 is traced apart)."""
    free = guard.free_symbols
    return all(guard.subs(dict.fromkeys(free, size)) != sympy.false for size in range(2, largest + 1))


def _in_words(guard: sympy.Basic) -> str:
    samples = sympy.Symbol("samples", integer=True)
    return str(PythonPrinter().doprint(guard.subs(dict.fromkeys(guard.free_symbols, samples))))


def _own_line(place: Any) -> str:
    """The line of the model that made an assumption; "" for one of torch's own."""
    if place.maybe_user_loc:  # "text  # path:12 in function"
        text, _, where = str(place.maybe_user_loc).rpartition("  # ")
        return f"{PurePath(where.rpartition(' in ')[0]).name}: {text}"  # dynamo cuts the path off
    frame = place.framework_loc
    if isinstance(frame, traceback.FrameSummary) and not is_foreign(frame.filename):
        return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""
