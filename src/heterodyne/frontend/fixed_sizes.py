"""Where a model compares its batch size with a number: the trace then holds for some sizes of a batch and not for others."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.printers import PythonPrinter

from heterodyne.errors import CaptureError
from heterodyne.frontend.arguments import leading_to
from heterodyne.frontend.faults import is_foreign, line_now, line_of

__all__ = ["SizeWatch", "refuse_another_graph", "refuse_choices_by_size", "sizes_to_try"]

_SIZES_AT_LEAST = 64
_MOST_TRIED = 3


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
            if _broken_by(guard.expr, samples) and (line := _own_line(guard.sloc)):
                raise _choice(line, guard.expr)


def sizes_to_try(graph: fx.Graph, samples: int, taken: Collection[int]) -> dict[sympy.Basic, list[int]]:
    """Return the assumptions on the batch size that torch made by itself, each with batch sizes that break it.

    Most such assumptions choose between equal ways to lay out memory. Whether one chooses another computation shows in a trace at such a
    size, see `refuse_another_graph`.

    Args:
        taken: sizes that the model's own dims have; a trace at one of them may confuse the two, so they come last.
    """
    found: dict[sympy.Basic, list[int]] = {}
    for shapes in _shapes_of(graph):
        for guard in shapes.guards:
            broken = sorted(_broken_by(guard.expr, samples), key=lambda size: size in taken)[:_MOST_TRIED]
            if broken and broken not in found.values() and not _own_line(guard.sloc):
                found[guard.expr] = broken
    return found


def refuse_another_graph(loss: fx.Node, other: fx.Node, assumed: sympy.Basic) -> None:
    """Raise CaptureError, with the line of the first op that differs, if two traces at two batch sizes are not of the same ops.

    Args:
        loss, other: what both traces return.
        assumed: what holds for the one size and not for the other.
    """
    for one, another in zip_longest(_ops_to(loss), _ops_to(other)):
        if one is None or another is None or one[1] != another[1]:
            node = (one or another)[0]
            raise _choice(line_of(node, full=True) or str(node.target), assumed)


def _ops_to(result: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """Each op that leads to a result, with a text of what it does: its operator, its arguments and the shapes that it returns."""
    order = leading_to([result])
    number = {node: place for place, node in enumerate(order)}
    for node in order:
        read = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number.get(n)}")
        values = node.meta.get("val")
        values = values if isinstance(values, tuple | list) else [values]
        shapes = [tuple(_size_in_words(size) for size in v.shape) if isinstance(v, Tensor) else None for v in values]
        yield node, f"{node.op} {node.target if node.op == 'call_function' else ''} {read} {shapes}"


def _size_in_words(size: Any) -> str:
    return str(size) if isinstance(size, int) else _in_words(size.node.expr)


def _choice(line: str, assumed: sympy.Basic) -> CaptureError:
    return CaptureError(
        f"{line}\nforward chooses by the number of samples: it was traced where {_in_words(assumed)}. Each device has "
        "some of the samples, in micro-batches of several sizes, and would choose otherwise than one device with all of "
        "them. Do the same for every number of samples, or choose by a constant that the model is given when it is built."
    )


def _shapes_of(graph: fx.Graph) -> list[ShapeEnv]:
    """Return what the trace of a graph assumes of sizes."""
    found: dict[int, ShapeEnv] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes: list[Any] = (
            [size for size in value.shape if not isinstance(size, int)] if isinstance(value, Tensor) else []
        )
        found |= {id(size.node.shape_env): size.node.shape_env for size in sizes}
    return list(found.values())


def _broken_by(guard: sympy.Basic, samples: int) -> list[int]:
    """The numbers of samples from 2 up (1 is traced apart) for which an assumption on the one size that is not fixed does not hold."""
    free = guard.free_symbols
    sizes = range(2, max(samples, _SIZES_AT_LEAST) + 1)
    return [size for size in sizes if guard.subs(dict.fromkeys(free, size)) == sympy.false]


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
