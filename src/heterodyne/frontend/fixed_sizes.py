"""Where a model compares its batch size with a number, and so makes the trace hold for that number alone."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from heterodyne.frontend.faults import is_foreign, line_now

__all__ = ["SizeWatch"]


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
