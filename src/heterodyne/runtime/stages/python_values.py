"""Numbers and choices that a model has as plain Python: in the pieces of its graph they are what they were when it was captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor, nn

from heterodyne.errors import PlanError

__all__ = ["PythonValues"]

_Value: TypeAlias = bool | int | float | complex | str | tuple["_Value", ...] | None
_PLAIN = (bool, int, float, complex, str, type(None))
_MANY = 64  # longer lists are data


class PythonValues:
    """Of a model whose graph runs in its place: attributes of its modules that its code names, and what functions that it holds (a loss)
    read from around them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = frozenset(name for code in _codes(module) for name in code.co_names)
        self._captured = self._now()

    def require_unchanged(self) -> None:
        """Raises PlanError, with the name, if one is another now."""
        now = self._now()
        for name, before in self._captured.items():
            after = now.get(name, before)
            if (after,) != (before,) or type(after) is not type(before):
                raise PlanError(
                    f"{name} was {before!r} when the model was captured and is {after!r} now, and this plan runs pieces of that graph, in "
                    "which it stays as it was. Make it an input of the batch, or a buffer (register_buffer) that is changed between steps; "
                    "or take a plan in which each device runs the whole model (plan='data', without recompute)"
                )

    def _now(self) -> dict[str, _Value]:
        found: dict[str, _Value] = {}
        for path, module in self._module.named_modules():
            for key, value in vars(module).items():
                name = repr(f"{path}.{key}".lstrip("."))
                if key in self._names and not key.startswith("_") and key != "training":
                    found |= _plain_parts(name, value)
                if isinstance(value, FunctionType | MethodType):
                    found |= _around(name, value)
        return found


def _plain_parts(name: str, value: object) -> Mapping[str, _Value]:
    """The value, or the attributes of an object such as a configuration, as far as they are plain."""
    held = {name: value}
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value):
        held = {f"{name}.{key}": part for key, part in vars(value).items() if not key.startswith("_")}
    frozen = {key: _frozen(part) for key, part in held.items()}
    return {key: part[0] for key, part in frozen.items() if part}


def _frozen(value: object) -> tuple[_Value] | tuple[()]:
    """A copy of a plain value, or nothing."""
    if isinstance(value, _PLAIN):
        return (value,)
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if not isinstance(value, list | tuple) or len(value) > _MANY:
        return ()
    parts = [_frozen(part) for part in value]
    return (tuple(part[0] for part in parts if part),) if all(parts) else ()


def _around(name: str, function: Callable[..., Any]) -> dict[str, _Value]:
    """What a function reads from its closure and from globals."""
    function = getattr(function, "__func__", function)
    code: CodeType = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=False)
    held = {key: cell.cell_contents for key, cell in cells if _is_filled(cell)}
    held |= {key: function.__globals__[key] for key in code.co_names if key in function.__globals__}
    found: dict[str, _Value] = {}
    for key, value in held.items():
        found |= {f"{key!r} (read by {name})": part[0] for part in [_frozen(value)] if part}
    return found


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _codes(module: nn.Module) -> Iterator[CodeType]:
    """Of all methods of all modules but those that torch itself has for any, and that build them."""
    for kind in dict.fromkeys(type(part) for part in module.modules()):
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for name, made in vars(base).items():
                if isinstance(made, FunctionType) and name not in ("__init__", "__repr__", "extra_repr"):
                    yield from _with_inner([made.__code__])


def _with_inner(codes: Iterable[object]) -> Iterator[CodeType]:
    for code in codes:
        if isinstance(code, CodeType):
            yield code
            yield from _with_inner(code.co_consts)
