"""What hooks and forwards of a model's copies write outside of them: they share the closures and globals of the user's own model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from heterodyne.code_read import is_filled, is_users

__all__ = ["unchanged_around"]

_DEEPEST = 3
_MOST_ENTRIES = 10_000  # a longer container holds data
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def unchanged_around(model: nn.Module) -> Iterator[None]:
    """Run copies of a model in the block; afterwards the containers and objects that its functions can write to are as they were."""
    restoring: list[Callable[[], None]] = []
    seen: set[int] = set()
    for value in _held(model):
        restoring += _restoring(value, _DEEPEST, seen)
    try:
        yield
    finally:
        for restore in restoring:
            restore()


def _held(model: nn.Module) -> Iterator[Any]:
    """What the hooks of the modules and the functions of their classes reach: closures, defaults, and globals that they name."""
    functions: dict[int, FunctionType] = {}
    for module in model.modules():
        for kind in _HOOKS:
            functions |= {id(hook): hook for hook in getattr(module, kind).values() if isinstance(hook, FunctionType)}
        for base in type(module).__mro__:
            if not base.__module__.startswith("torch."):
                functions |= {id(made): made for made in vars(base).values() if isinstance(made, FunctionType)}
    for function in functions.values():
        yield from (cell.cell_contents for cell in function.__closure__ or () if is_filled(cell))
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if is_users(function):
            named = _names(function.__code__)
            yield from (value for name, value in function.__globals__.items() if name in named)


def _restoring(value: Any, depth: int, seen: set[int]) -> Iterator[Callable[[], None]]:
    """Give what brings a container, or the attributes of an object, back to what is in it now; and so for what is in these."""
    if id(value) in seen or depth == 0 or isinstance(value, (Tensor, type, ModuleType, FunctionType)):
        return
    seen.add(id(value))
    held: Any
    if isinstance(value, dict):
        held, entries = dict(value), list(value.values())
    elif isinstance(value, (list, set, deque)):
        held = entries = list(value)
    elif hasattr(value, "__dict__") and is_users(type(value)):
        held = {name: entry for name, entry in vars(value).items() if _is_own(value, name)}
        entries = list(held.values())
    else:
        return
    if len(entries) > _MOST_ENTRIES:
        return
    yield partial(_set_back, value, held)
    for entry in entries:
        yield from _restoring(entry, depth - 1, seen)


def _set_back(holder: Any, held: Any) -> None:
    if isinstance(holder, list):
        holder[:] = held
    elif isinstance(holder, (dict, set, deque)):
        holder.clear()
        (holder.extend if isinstance(holder, deque) else holder.update)(held)
    else:
        for name in [name for name in vars(holder) if _is_own(holder, name) and name not in held]:
            del vars(holder)[name]
        vars(holder).update(held)


def _is_own(holder: Any, name: str) -> bool:
    """Whether an attribute is the user's: those of `nn.Module` itself hold weights, which the block may move."""
    return not (isinstance(holder, nn.Module) and name.startswith("_"))


def _names(code: CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
