"""What the code reads that a model's forward may come to: names of attributes, globals, and what functions have around them."""

from __future__ import annotations

import dis
import inspect
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

__all__ = ["CodeRead"]

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ENTRIES = ("forward", "__call__")


@dataclass(frozen=True, kw_only=True)
class CodeRead:
    """Of a model, what stands in its code and in that which this names: methods and properties of its modules and of objects that they
    call, and functions.

    Args:
        names: of attributes; own: those in code that is no installed library's; assigned: those that are written.
        functions: that it comes to, none of libraries.
        with_modes: classes of modules whose forward asks if it trains, as that of dropout and of BatchNorm does.
    """

    names: frozenset[str]
    own: frozenset[str]
    assigned: frozenset[str]
    functions: tuple[FunctionType, ...]
    with_modes: frozenset[type]

    @classmethod
    def of(cls, module: nn.Module) -> CodeRead:
        methods, functions = _written(module)
        names: set[str] = set()
        assigned: set[str] = set()
        own: set[str] = set()
        seen: dict[int, FunctionType] = {}
        coming: list[FunctionType] = list(functions)
        asked = set(_ENTRIES)
        while coming or asked:
            for name in asked:
                coming += methods.get(name, ())
            names |= asked
            asked = set()
            while coming:
                function = coming.pop()
                if id(function) in seen:
                    continue
                seen[id(function)] = function
                for code in _with_inner(function.__code__):
                    asked |= set(code.co_names) - names
                    own |= set(code.co_names) if _is_users(function) else set()
                    assigned |= _named(code, "STORE_ATTR")
                coming += [
                    value for _, value in _around(function) if isinstance(value, FunctionType) and _is_users(value)
                ]
        kinds = {type(part) for part in module.modules()}
        return cls(
            names=frozenset(names),
            own=frozenset(own),
            assigned=frozenset(assigned),
            functions=tuple(function for function in seen.values() if _is_users(function)),
            with_modes=frozenset(kind for kind in kinds if _has_modes(kind)),
        )

    def of_class(self, kind: type) -> Collection[str]:
        """The names of plain values that a class of modules has for all of its modules."""
        return _plain_of_class(kind, self.names)

    def around(self, function: FunctionType) -> Iterable[tuple[str, Any]]:
        """What a function reads from its closure and from globals, by name; nothing of libraries, and nothing that it writes itself."""
        return _around(function) if _is_users(function) else []


def _written(module: nn.Module) -> tuple[dict[str, list[FunctionType]], list[FunctionType]]:
    """The methods, by name, of its modules and of the objects that these have as attributes to call; and functions that are such."""
    methods: dict[str, list[FunctionType]] = {}
    functions: list[FunctionType] = []
    kinds: dict[type, None] = dict.fromkeys(type(part) for part in module.modules())
    for part in module.modules():
        for called in map(_called, vars(part).values()):
            if isinstance(called, FunctionType):
                functions.append(called)
            elif callable(called) and hasattr(called, "__dict__") and not isinstance(called, type):
                kinds[type(called)] = None
    for base in dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base not in (nn.Module, object)):
        for name, made in vars(base).items():
            function = inspect.unwrap(made.fget if isinstance(made, property) and made.fget else made)
            function = getattr(function, "__func__", function)
            if isinstance(function, FunctionType):
                methods.setdefault(name, []).append(function)
    return methods, [function for function in functions if _is_users(function)]


def _called(value: object) -> object:
    """The function in a method, and in arguments that are bound to it."""
    while isinstance(value, partial):
        value = value.func
    return getattr(value, "__func__", value)


def _around(function: FunctionType) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    held = {key: cell.cell_contents for key, cell in cells if _is_filled(cell)}
    for key in _globals_read(function.__code__):
        if key in function.__globals__:
            held[key] = function.__globals__[key]
    return [(key, value) for key, value in held.items() if _is_users(value)]


@cache
def _globals_read(code: CodeType) -> frozenset[str]:
    codes = list(_with_inner(code))
    written = {name for each in codes for name in _named(each, "STORE_GLOBAL")}
    return frozenset(name for each in codes for name in _named(each, "LOAD_GLOBAL")) - written


@cache
def _named(code: CodeType, operation: str) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == operation)


def _is_users(value: object) -> bool:
    """Not a module, a class or a function of an installed library."""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        place, top = value.__code__.co_filename, value.__module__
    elif isinstance(value, ModuleType | type):
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        place, top = getattr(module, "__file__", None) or "", getattr(module, "__name__", "builtins")
        if not place and top != "__main__":
            return False
    else:
        return True
    return not place.startswith(_LIBRARIES) and (top or "").partition(".")[0] != "heterodyne"


@cache
def _plain_of_class(kind: type, names: frozenset[str]) -> tuple[str, ...]:
    bases = [base for base in kind.__mro__ if base is not object and base is not nn.Module]
    return tuple(
        {key: None for base in bases for key, value in vars(base).items() if key in names and _counts(key, value)}
    )


def _counts(key: str, value: object) -> bool:
    return isinstance(value, bool | int | float | str) and not key.startswith("__")


def _has_modes(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and "training" in code.co_names


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
