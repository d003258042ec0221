"""What a model keeps beside weights: attributes of its modules, and what the closures and globals of its hooks and forwards hold.

Copies of a model share the latter with the user's own model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from heterodyne.code_read import CodeRead, is_filled, is_users

__all__ = ["HOOKS", "OF_TORCH", "Kept", "Root", "defaults_of", "functions_of", "kept_by", "root_of", "unchanged_around"]

_DEEPEST = 3
_MOST_ENTRIES = 10_000  # a longer container holds data
OF_TORCH: Final = frozenset(vars(nn.Module()))
"""What torch keeps in each module."""
HOOKS: Final = tuple(name for name in vars(nn.Module()) if name.endswith("_hooks") and "state_dict" not in name)
"""Of these, the tables of hooks that a step calls."""
_OF_MODULES = OF_TORCH - {"training"}

Root: TypeAlias = str | tuple[str, int] | tuple[int, str]
"""Where a walk through what a model keeps begins, alike in all copies: the path of a module; that, and the number of one of its classes;
the number of a function (`functions_of`), and ``globals``, ``defaults``, ``attributes`` or the name of a variable of its closure."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Kept:
    """A value, and where it stands: in a container, or as an attribute of an object, or as a variable of functions.

    Args:
        name: as the user would write it, ``blocks.0.state['calls']``.
        holder: a dict, list, deque or cell, or an object with attributes.
        key: of it there; None for a cell; for a hook of a module the name of the table, and its number there.
        root: where the walk to it has begun.
        outer: the place of its container; None for attributes of modules and variables.
        module: the module of whose attributes it is, or is part of one; None: it is of a variable.
    """

    name: str
    holder: Any
    key: Any
    value: Any
    root: Root
    outer: Kept | None = None
    module: nn.Module | None = None

    @property
    def attribute(self) -> str:
        """The attribute of the module or object, or the variable, that this is or is part of."""
        return str(self.key) if self.outer is None else self.outer.attribute


def kept_by(model: nn.Module, functions: Sequence[FunctionType]) -> Iterator[Kept]:
    """Yield what modules have as attributes besides parameters, buffers and modules, what functions have around them, and entries of these.

    ``functions``: those that forward may call (`functions_of`).
    """
    seen = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in _OF_MODULES:
                name = f"{path}.{attribute}" if path else attribute
                kept = Kept(name=name, holder=module, key=attribute, value=value, root=path, module=module)
                yield from _with_entries(kept, _DEEPEST, seen)
        for kind in HOOKS:
            for number, hook in enumerate(getattr(module, kind).values()):
                kept = Kept(name=f"a hook of {path!r}", holder=module, key=(kind, number), value=hook, root=path)
                yield from _with_entries(kept, _DEEPEST, seen)
    yield from _kept_around(model, functions, seen)


def _kept_around(model: nn.Module, functions: Sequence[FunctionType], seen: set[int]) -> Iterator[Kept]:
    for kept in (*_of_classes(model), *_variables(functions)):
        yield from _with_entries(kept, _DEEPEST, seen)


def root_of(model: nn.Module, root: Root) -> Any:
    """Return the holder at which the walk begins."""
    if isinstance(root, str):
        return model.get_submodule(root)
    if isinstance(root[0], str):
        return type(model.get_submodule(root[0])).__mro__[int(root[1])]
    function, kind = functions_of(model)[root[0]], str(root[1])
    if kind == "globals":
        return function.__globals__
    if kind in ("defaults", "attributes"):
        return function
    return (function.__closure__ or ())[function.__code__.co_freevars.index(kind)]


@contextmanager
def unchanged_around(model: nn.Module) -> Iterator[None]:
    """Run the model and copies of it in the block; afterwards its attributes, and the containers and objects that its functions can write
    to, are as they were."""
    restoring: list[Callable[[], None]] = [
        partial(_set_attributes, module, _attributes_of(module)) for module in model.modules()
    ]
    seen: set[int] = set()
    of_model = {id(module) for module in model.modules()}
    functions = functions_of(model)
    restoring += [partial(_set_back, function, dict(vars(function))) for function in functions]
    for kept in _kept_around(model, functions, of_model):
        if kept.outer is None and isinstance(kept.holder, CellType | dict):
            restoring.append(partial(_set_variable, kept))
        elif isinstance(kept.holder, type) and id(kept.holder) not in seen:
            seen.add(id(kept.holder))
            restoring.append(partial(_set_back, kept.holder, _data_of(kept.holder)))
        held = None if isinstance(kept.value, MethodType) else _held(kept.value)
        if held is not None and id(kept.value) not in seen:
            seen.add(id(kept.value))
            restoring.append(partial(_set_back, kept.value, held))
    try:
        yield
    finally:
        for restore in restoring:
            restore()


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that are none of torch's own."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES and name != "training"}


def _set_attributes(module: nn.Module, before: dict[str, Any]) -> None:
    for name in _attributes_of(module).keys() - before.keys():
        del vars(module)[name]
    vars(module).update(before)


def _of_classes(model: nn.Module) -> Iterator[Kept]:
    """Yield what classes of modules have as attributes for all their objects, but for functions and descriptors."""
    seen: set[type] = set()
    for path, module in model.named_modules():
        for number, base in enumerate(type(module).__mro__):
            if base not in seen and is_users(base):
                seen.add(base)
                for name, value in _data_of(base).items():
                    yield Kept(name=f"{base.__name__}.{name}", holder=base, key=name, value=value, root=(path, number))


def _data_of(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not hasattr(value, "__get__") and not isinstance(value, type)
    }


def functions_of(model: nn.Module) -> list[FunctionType]:
    """Return the functions that forward may call: hooks, methods of modules, and what the user's code calls by name."""
    found: dict[int, FunctionType] = {}
    for module in model.modules():
        for hook in (hook for kind in HOOKS for hook in getattr(module, kind).values()):
            called = hook.func if isinstance(hook, partial) else hook
            called = getattr(called, "__func__", called)
            if isinstance(called, FunctionType):
                found[id(called)] = called
        for base in type(module).__mro__:
            if not base.__module__.startswith("torch."):
                found |= {id(made): made for made in vars(base).values() if isinstance(made, FunctionType)}
    found |= {id(function): function for function in CodeRead.of(model).functions}
    return list(found.values())


def _variables(functions: Sequence[FunctionType]) -> Iterator[Kept]:
    """Yield what functions have around them: closures, defaults, attributes, globals that they name."""
    for number, function in enumerate(functions):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if is_filled(cell):
                yield Kept(name=name, holder=cell, key=None, value=cell.cell_contents, root=(number, name))
        called = function.__name__
        for place, value in enumerate(defaults_of(function)):
            yield Kept(
                name=f"default {place} of {called}()",
                holder=function,
                key=place,
                value=value,
                root=(number, "defaults"),
            )
        if is_users(function):
            for name, value in vars(function).items():
                yield Kept(name=f"{called}.{name}", holder=function, key=name, value=value, root=(number, "attributes"))
            own = function.__globals__
            for name in sorted(_names(function.__code__) & own.keys()):
                yield Kept(name=name, holder=own, key=name, value=own[name], root=(number, "globals"))


def defaults_of(function: FunctionType) -> tuple[Any, ...]:
    """Return the defaults of arguments, those by keyword last."""
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _with_entries(kept: Kept, depth: int, seen: set[int]) -> Iterator[Kept]:
    yield kept
    value = kept.value
    held = list(value) if isinstance(value, tuple) else _held(value)
    held = None if depth == 0 or id(value) in seen else held
    if held is None or len(held) > _MOST_ENTRIES:
        return
    seen.add(id(value))
    if isinstance(value, set):
        return
    in_brackets = isinstance(value, dict | list | tuple | deque)
    entries = list(held.items() if isinstance(held, dict) else enumerate(held))
    if not in_brackets and not isinstance(value, type | MethodType):
        entries.append(("__class__", type(value)))
    for key, entry in entries:
        if key == "__class__" or isinstance(value, MethodType):
            name = entry.__name__ if isinstance(entry, type) else type(entry).__name__
        else:
            name = f"{kept.name}[{key!r}]" if in_brackets else f"{kept.name}.{key}"
        inner = Kept(name=name, holder=value, key=key, value=entry, root=kept.root, outer=kept, module=kept.module)
        yield from _with_entries(inner, depth - 1, seen)


def _held(value: Any) -> dict[Any, Any] | list[Any] | None:
    """Return what is in a container or object of the user; None for anything else."""
    if isinstance(value, Tensor | ModuleType | FunctionType):
        return None
    if isinstance(value, type):
        return _data_of(value) if is_users(value) else None
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | set | deque):
        return list(value)
    if not is_users(type(value)):
        return None
    slots = [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    inside = {name: getattr(value, name) for name in slots if not name.startswith("__") and hasattr(value, name)}
    return inside | {name: entry for name, entry in getattr(value, "__dict__", {}).items() if _is_own(value, name)}


def _set_variable(kept: Kept) -> None:
    if isinstance(kept.holder, CellType):
        kept.holder.cell_contents = kept.value
    else:
        kept.holder[kept.key] = kept.value


def _set_back(holder: Any, held: Any) -> None:
    if isinstance(holder, list):
        holder[:] = held
    elif isinstance(holder, dict | set | deque):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(held)
    elif isinstance(holder, type):
        for name, value in _data_of(holder).items():
            if name not in held:
                delattr(holder, name)
            elif held[name] is not value:
                setattr(holder, name, held[name])
    else:
        for name in [name for name in getattr(holder, "__dict__", {}) if _is_own(holder, name) and name not in held]:
            del vars(holder)[name]
        for name, value in held.items():
            if getattr(holder, name, None) is not value:
                object.__setattr__(holder, name, value)


def _is_own(holder: Any, name: str) -> bool:
    """Return whether an attribute is the user's: those of `nn.Module` itself hold weights, which the block may move."""
    return not (isinstance(holder, nn.Module) and name.startswith("_"))


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
