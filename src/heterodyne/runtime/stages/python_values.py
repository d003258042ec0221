"""Numbers and choices that a model has as plain Python: in the pieces of its graph they are what they were when it was captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

from torch import Tensor, nn

from heterodyne.errors import PlanError

__all__ = ["PythonValues"]

_Value: TypeAlias = bool | int | float | complex | str | tuple["_Value", ...] | None
_PLAIN = (bool, int, float, complex, str, type(None))
_MANY = 64  # longer lists are data


class PythonValues:
    """Of a model whose graph runs in its place: attributes of its modules that its forward may read, and what functions that it holds
    (a loss) read from around them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = _names_read(module)
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
                    found |= _plain_parts(name, value, self._names)
                if key == "training" and _has_modes(type(module)):
                    found[name] = bool(value)
                if isinstance(value, FunctionType | MethodType):
                    found |= _around(name, value)
        return found


def _plain_parts(name: str, value: object, names: Collection[str]) -> Mapping[str, _Value]:
    """The value as far as it is plain, or the numbers of an object such as a configuration whose names are among these: words in one are
    changed by saving it (of Transformers: ``dtype``)."""
    held = {name: value}
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value):
        held = {
            f"{name}.{key}": part for key, part in vars(value).items() if key in names and isinstance(part, int | float)
        }
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


def _has_modes(kind: type[nn.Module]) -> bool:
    """Whether forward asks if it trains, as that of dropout and of BatchNorm does."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "training" in code.co_names


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _names_read(module: nn.Module) -> frozenset[str]:
    """All names in the code that forward may come to: its own, and that of methods and properties which such code names."""
    kinds = dict.fromkeys(type(part) for part in module.modules())
    bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__[: kind.__mro__.index(nn.Module)])
    methods: dict[str, list[CodeType]] = {}
    for base in bases:
        for name, made in vars(base).items():
            function = inspect.unwrap(made.fget if isinstance(made, property) and made.fget else made)
            if isinstance(function, FunctionType):
                methods.setdefault(name, []).append(function.__code__)
    seen: set[str] = set()
    coming = {"forward"}
    while coming:
        name = coming.pop()
        seen.add(name)
        coming |= {n for code in _with_inner(methods.get(name, ())) for n in code.co_names} - seen
    return frozenset(seen)


def _with_inner(codes: Iterable[object]) -> Iterator[CodeType]:
    for code in codes:
        if isinstance(code, CodeType):
            yield code
            yield from _with_inner(code.co_consts)
