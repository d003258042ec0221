"""Numbers, choices and tensors that a model has as plain Python: in the pieces of its graph they are as when it was captured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TypeAlias

import numpy as np
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from heterodyne.errors import PlanError
from heterodyne.runtime.stages.code_read import CodeRead

__all__ = ["PythonValues"]

_Frozen: TypeAlias = "tuple[object] | tuple[()]"  # what can be compared later, or nothing
_PLAIN = (bool, int, float, complex, str, type(None))
_CALLED = (FunctionType, BuiltinFunctionType, MethodType, partial)
_MANY = 64  # longer lists and arrays are data
_DEEP = 3  # of objects in objects
_OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})


class PythonValues:
    """Of a model whose graph runs in its place: what its forward may read of its modules, their classes and whatever these hold, of
    objects that are called (a loss), and of globals and closures.

    Tensors that are no parameters or buffers belong to it: the graph has them as they were. What forward itself assigns does not, if it is
    a tensor, a function, or private: such a name keeps what a forward has made, and no graph asks for it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._code = CodeRead.of(module)
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

    def _now(self) -> dict[str, object]:
        found: dict[str, object] = {}
        read = self._code
        for path, module in self._module.named_modules():
            kind = type(module)
            for key, value in vars(module).items():
                name = repr(f"{path}.{key}".lstrip("."))
                if self._is_read(key) and key not in _OF_TORCH:
                    found |= self._parts(name, key, value)
                if key in _HOOKS:
                    found[f"the number of hooks in {name}"] = len(value)
                if key == "training" and kind in read.with_modes:
                    found[name] = bool(value)
                function = value.__func__ if isinstance(value, MethodType) else value
                if isinstance(function, FunctionType):
                    found |= self._around(name, function)
            for key in read.of_class(kind):
                if key not in vars(module):
                    found |= self._parts(repr(f"{path}.{key}".lstrip(".")), key, getattr(kind, key))
        for function in read.functions:
            found |= self._around(function.__qualname__, function)
        return found

    def _is_read(self, key: str) -> bool:
        """What is private to a library is its own affair."""
        return key in (self._code.own if key.startswith("_") else self._code.names)

    def _parts(self, name: str, key: str, value: object) -> dict[str, object]:
        """What an attribute is: a plain value, a tensor or a function, or the numbers and tensors of an object, and of those in it, whose
        names are read: words in a configuration are changed by saving it (of Transformers: ``dtype``)."""
        kept = key in self._code.assigned
        frozen = () if kept and key.startswith("_") else _frozen(value)
        if frozen and kept and not _is_plain(frozen[0]):
            return {}
        if frozen or not _has_attributes(value):
            return {name: frozen[0]} if frozen else {}
        return self._of_object(name, value, _DEEP)

    def _of_object(self, name: str, value: object, deep: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, part in vars(value).items():
            if not self._is_read(key):
                continue
            if isinstance(part, int | float | Tensor | np.ndarray):
                found |= {f"{name}.{key}": frozen for frozen in _frozen(part)}
            elif deep > 1 and _has_attributes(part):
                found |= self._of_object(f"{name}.{key}", part, deep - 1)
        return found

    def _around(self, name: str, function: FunctionType) -> dict[str, object]:
        """What a function reads from its closure and from globals."""
        found: dict[str, object] = {}
        for key, value in self._code.around(function):
            here = f"{key!r} (read by {name})"
            if isinstance(value, ModuleType | type):
                numbers = {k: v for k, v in vars(value).items() if k in self._code.names and isinstance(v, int | float)}
                found |= {f"{key}.{k!r} (read by {name})": number for k, number in numbers.items()}
            elif not isinstance(value, nn.Module | FunctionType):
                found |= self._parts(here, "", value)
        return found


class _SameTensor:
    """A tensor as it was: the same one, and not written to, as far as autograd counts it or, of few elements on the host, as they tell."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor._version
        few = tensor.device.type == "cpu" and tensor.numel() <= _MANY
        self._values = tensor.detach().clone() if few else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _SameTensor) or other._tensor is not self._tensor or other._version != self._version:
            return False
        return self._values is None or other._values is None or _alike(self._values, other._values)

    __hash__ = None  # type: ignore[assignment]  # it is compared alone

    def __repr__(self) -> str:
        return str(self._values) if self._values is not None else f"a tensor of {tuple(self._tensor.shape)}"


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _frozen(value: object) -> _Frozen:
    """A copy that can be compared, or nothing."""
    if isinstance(value, (*_PLAIN, *_CALLED)):
        return (value,)
    if isinstance(value, Tensor):
        made = value.requires_grad or isinstance(value, FakeTensor | nn.Parameter) or value.is_meta
        return () if made else (_SameTensor(value),)
    if isinstance(value, np.ndarray):
        return (tuple(value.ravel().tolist()),) if value.size <= _MANY else ()
    if isinstance(value, Mapping):
        value = [part for item in value.items() for part in item]
    if not isinstance(value, list | tuple) or len(value) > _MANY:
        return ()
    parts = [_frozen(part) for part in value]
    return (tuple(part[0] for part in parts if part),) if all(parts) else ()


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type, ModuleType, *_CALLED))
