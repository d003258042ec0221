"""One walk through all that forward and loss may read of a model, beside the batch and the values of weights: where each value stands."""

from __future__ import annotations

import ctypes
import re
import weakref
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from numbers import Number
from operator import is_
from threading import local
from types import BuiltinFunctionType, FunctionType, MethodType, MethodWrapperType, ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.nn.modules import module as module_hooks

from heterodyne.around_model import HOOKS, OF_TORCH
from heterodyne.code_read import CodeRead, around_of, environment_of, is_users, looks_globals_up
from heterodyne.runtime.recapture.values_read import (
    ClassOf,
    Itself,
    SameArray,
    SameDefaultType,
    SameFunction,
    SameTensor,
    SameValue,
    SameVariable,
)

__all__ = ["CALLED", "Walk", "quoted"]

CALLED = (FunctionType, BuiltinFunctionType, MethodType, MethodWrapperType)
_PLAIN = (bool, int, float, complex, Number, str, bytes, type(None), Enum, range, slice, torch.Size)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_MANY = 256  # longer lists are data
_DEEP = 12  # of objects and containers in each other
_BYTES = (array, bytearray)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_CONTAINERS = (Mapping, *_SEQUENCES, *_SETS)
_HOLDERS = (SimpleNamespace, Namespace, local)
"""Classes of the standard library whose objects have as attributes what the user puts there."""


class Walk:
    """Goes through all that is read, and notes for each value where it stands."""

    def __init__(self, code: CodeRead, of_forward: Collection[str], *, runs: bool) -> None:
        self.values: dict[str, object] = {}
        self.modes: dict[str, bool] = {}
        self.called: list[object] = []  # functions that stand somewhere as values
        self._code = code
        self._assigned = code.assigned if runs else frozenset()
        self._of_forward = of_forward
        self._slots: list[tuple[Any, Any]] = []
        self._held: list[object] = []
        self._sized: list[Any] = []
        self._orders: list[tuple[Mapping[Any, Any], tuple[Any, ...]]] = []
        self._of_model: set[int] = set()
        self._tensors: list[Tensor] = []
        self._stored: list[Tensor] = []
        self._compared: list[SameValue] = []
        self._seen: set[int] = set()
        self._readers: dict[str, list[FunctionType]] = {}  # functions of one name

    def is_same(self) -> bool:
        try:
            now = [holder[key] for holder, key in self._slots]
        except (KeyError, IndexError, ValueError):
            return False
        return (
            all(map(is_, now, self._held))
            and list(map(type, self._parts)) == self._kinds
            and list(map(len, self._sized)) == self._sizes
            and all(tuple(mapping) == keys for mapping, keys in self._orders)
            and [tensor._version for tensor in self._tensors] == self._versions
            and [(tensor.requires_grad, tensor.dtype) for tensor in self._stored] == self._trained
            and all(same.is_still() for same in self._compared)
        )

    def all_of(self, module: nn.Module) -> None:
        self._of_model = {id(of) for of in (*module.modules(), *module.parameters())}
        for path, part in module.named_modules():
            self._module(path, part)
        for function in self._code.functions:
            self._around(function)
            for key in ("__code__", "__defaults__", "__kwdefaults__"):
                self._slot(_Attributes(function), key, getattr(function, key))
            self._object(function.__qualname__, function, _DEEP)
            number = len(self._readers[function.__qualname__])
            self.values[f"the code of {quoted(function.__qualname__)}, {number}"] = SameFunction(function.__code__)
        self._parts = list(module.modules())
        self._kinds = list(map(type, self._parts))
        for place, called in ((functional, "torch.nn.functional"), (torch, "torch"), (Tensor, "torch.Tensor")):
            self._replaceable(vars(place), called)
        for key, table in vars(module_hooks).items():
            if key.startswith("_global_") and isinstance(table, dict):
                self._hooks(f"torch.nn.modules.module.{key}", table)
        default = SameDefaultType()
        self._compared.append(default)
        self.values["torch.get_default_dtype()"] = str(default.value)
        self._sizes = list(map(len, self._sized))
        self._versions = [tensor._version for tensor in self._tensors]
        self._trained = [(tensor.requires_grad, tensor.dtype) for tensor in self._stored]

    def _replaceable(self, place: Mapping[str, Any], called: str) -> None:
        """Note what code calls of torch, its own modules too, so that what a script puts in the place of it is seen."""
        self._sized.append(place)
        for key in sorted(self._code.names & place.keys()):
            if callable(place[key]):
                self._slot(place, key, place[key])
                self.values[quoted(f"{called}.{key}")] = SameFunction(place[key])

    def _slot(self, holder: Any, key: Any, value: object) -> None:
        self._slots.append((holder, key))
        self._held.append(value)

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        own, kind = vars(module), type(module)
        users = is_users(kind)
        self._sized.append(own)
        for key, value in own.items():
            if key == "training":
                self._mode(_joined(path, key), own, kind)
            elif key in HOOKS:
                self._hooks(_joined(path, key), value)
            elif key not in OF_TORCH and self._is_read(key, users=users):
                self._attribute(_joined(path, key), own, key, value)
        for table in (module._parameters, module._buffers):
            self._tables(path, table, outside=id(module) not in self._of_model)
        self._ordered(_joined(path, "_modules"), module._modules)
        for key, part in module._modules.items():
            self._slot(module._modules, key, part)
            self.values[quoted(_joined(path, key))] = None if part is None else ClassOf(type(part))
        self._of_classes(path, kind, own, _DEEP)

    def _of_classes(self, path: str, kind: type, own: Mapping[str, Any], deep: int) -> None:
        """Note what its classes have as attributes that code names, and as methods."""
        for base in (base for base in kind.__mro__ if base not in (nn.Module, object)):
            for key, value in list(vars(base).items()):
                if key in self._code.names and key not in own and not key.startswith("__") and _is_value(value):
                    self._attribute(_joined(path, key), vars(base), key, value, deep)
            self._methods(base)

    def _methods(self, base: type) -> None:
        """Note what a class of the user has as methods and properties, and one of a library as ``forward``, once for each class."""
        if id(base) in self._seen:
            return
        self._seen.add(id(base))
        users = is_users(base)
        if users:
            self._sized.append(vars(base))
        for key, value in vars(base).items():
            if isinstance(value, FunctionType | property) and (users or key == "forward"):
                self._slot(vars(base), key, value)
                self.values[quoted(f"{base.__qualname__}.{key}")] = SameFunction(value)

    def _mode(self, name: str, own: dict[str, Any], kind: type) -> None:
        if kind in self._code.with_modes or self._code.computed:
            self._slot(own, "training", own["training"])
            (self.values if is_users(kind) or _asks_more(kind) else self.modes)[quoted(name)] = own["training"]

    def _tables(self, path: str, table: Mapping[str, Tensor | None], *, outside: bool) -> None:
        """Note weights and buffers. Those of a module ``outside`` of the model, such as a teacher, are constants of its graph."""
        self._sized.append(table)
        for key, tensor in table.items():
            self._slot(table, key, tensor)
            if tensor is not None:
                self._object(_joined(path, key), tensor, 1)
            if tensor is not None and outside:
                self._tensor(_joined(path, key), tensor)
            elif tensor is not None:
                self._stored.append(tensor)
                self.values[f"requires_grad of {_joined(path, key)!r}"] = tensor.requires_grad
                if isinstance(tensor, nn.Parameter):
                    self.values[f"the type of {_joined(path, key)!r}"] = str(tensor.dtype).removeprefix("torch.")

    def _hooks(self, name: str, table: Mapping[Any, Any]) -> None:
        self._sized.append(table)
        for place, (key, hook) in enumerate(table.items()):  # keys are numbers that differ from process to process
            self._slot(table, key, hook)
            self._value(f"{name}[{place}]", hook, 1)
        self.values[f"the hooks in {name!r}"] = tuple(map(SameFunction, table.values()))

    def _is_read(self, key: str, *, users: bool) -> bool:
        """Return whether code names it, or torch calls it; what is private to a library is its own affair."""
        if key == "forward" or (users and self._code.computed):
            return True
        return key in (self._code.own if key.startswith("_") else self._code.names)

    def _attribute(self, name: str, holder: Any, key: Any, value: object, deep: int = _DEEP) -> None:
        if str(key) in self._assigned and (str(key).startswith("_") or not isinstance(value, _PLAIN)):
            return
        if quoted(name) in self._of_forward:
            return
        self._slot(holder, key, value)
        self._value(name, value, deep)

    def _value(self, name: str, value: object, deep: int) -> None:
        """Note a value, and what is in it."""
        if isinstance(value, _PLAIN):
            self.values[quoted(name)] = value
            if deep and hasattr(value, "__dict__") and not isinstance(value, Enum):
                self._object(name, value, deep - 1)
        elif isinstance(value, Tensor):
            if id(value) not in self._of_model:  # whose weights are read as they are
                self._tensor(name, value)
        elif isinstance(value, np.ndarray | np.generic):
            self._array(name, value)
        elif isinstance(value, CALLED):
            self.values[quoted(name)] = SameFunction(value)
            self.called.append(value)
            of = getattr(value, "__self__", None)  # also of a method in C, as ``cfg.get``
            if deep and of is not None and not isinstance(of, type | ModuleType):
                self._value(f"{name}.__self__", of, deep - 1)
            elif isinstance(value, FunctionType) and deep:
                self._object(name, value, deep - 1)
        elif deep and id(value) not in self._seen:
            self._inside(name, value, deep - 1)

    def _inside(self, name: str, value: object, deep: int) -> None:
        if isinstance(value, nn.Module):
            for path, part in value.named_modules(prefix=name):
                self._module(path, part)
            return
        self._seen.add(id(value))
        if type(value).__module__.partition(".")[0] == "heterodyne":
            return  # what an adapter passes to a step beside the batch is no change of the script's
        self.values[f"the class of {quoted(name)}"] = ClassOf(type(value))
        if isinstance(value, partial):
            self._value(name, value.func, deep)
            for place, part in enumerate(value.args):
                self._value(f"{name}({place})", part, deep)
            for key, part in value.keywords.items():
                self._slot(value.keywords, key, part)
                self._value(f"{name}({key})", part, deep)
        elif isinstance(value, Mapping):
            self._ordered(name, value)
            self._entries(name, value, list(value), deep)
        elif isinstance(value, _SEQUENCES):
            self._entries(name, value, range(len(value)), deep)
        elif isinstance(value, _SETS) and len(value) <= _MANY:
            self.values[quoted(name)] = frozenset(map(_shown, value))
            self._sized.append(value)
        elif isinstance(value, type | ModuleType):
            self._names_of(name, value, deep)
        elif isinstance(value, ContextVar):
            self._attribute(name, _Current(value), 0, _Current(value)[0], deep)
        elif isinstance(value, weakref.ref):
            self._value(name, value(), deep)
        elif isinstance(value, SynchronizedBase):
            self._value(name, value.get_obj(), deep)
        elif isinstance(value, torch.optim.Optimizer):
            groups = [{k: v for k, v in group.items() if k != "params"} for group in value.param_groups]
            for group, options in zip(value.param_groups, groups, strict=True):
                for key in options:
                    self._slot(group, key, group[key])
            self._value(f"{name}.param_groups", groups, deep)
        elif isinstance(value, (*_BYTES, ctypes._SimpleCData)):
            self._copied(name, value)
        elif hasattr(value, "__dict__"):
            self._object(name, value, deep)
        else:
            self.values[quoted(name)] = Itself(value)
        if isinstance(value, _CONTAINERS) and is_users(type(value)) and hasattr(value, "__dict__"):
            self._object(name, value, deep)
        for key in _slots_of(type(value)):
            if hasattr(value, key) and self._is_read(key, users=is_users(type(value))):
                self._attribute(f"{name}.{key}", _Attributes(value), key, getattr(value, key), deep)

    def _entries(self, name: str, container: Any, keys: Sequence[Any], deep: int) -> None:
        self._sized.append(container)
        if len(keys) > _MANY:
            return
        self.values[f"the number of entries of {quoted(name)}"] = len(keys)
        for key in keys:
            self._slot(container, key, container[key])
            self._value(f"{name}[{_shown(key)}]", container[key], deep)

    def _ordered(self, name: str, mapping: Mapping[Any, Any]) -> None:
        """Note in which order a mapping has its entries: code may go through them."""
        self._sized.append(mapping)
        if 1 < len(mapping) <= _MANY:
            self._orders.append((mapping, tuple(mapping)))
            self.values[f"the order of {quoted(name)}"] = tuple(map(_shown, mapping))

    def _object(self, name: str, value: object, deep: int) -> None:
        """Attributes whose names are read. Those of an object of a library change in its own use (``config.dtype`` of Transformers on
        saving): of these the numbers, tensors and objects count."""
        own, users = vars(value), is_users(type(value)) or isinstance(value, _HOLDERS)
        self._sized.append(own)
        for key, part in list(own.items()):
            if self._is_read(key, users=users) and (users or not isinstance(part, str | type(None))):
                self._attribute(f"{name}.{key}", own, key, part, deep)
        if users:
            self._of_classes(name, type(value), own, deep)

    def _names_of(self, name: str, place: type | ModuleType, deep: int) -> None:
        """Note what a class or a module has that code reads by name; of a library's, numbers and functions, and of modules in it."""
        users = is_users(place)
        for base in place.__mro__[:-1] if isinstance(place, type) else (place,):
            if users and isinstance(base, type):
                self._sized.append(vars(base))
            for key in sorted(self._code.own & vars(base).keys()):
                value = vars(base)[key]
                if isinstance(value, (int, float, *CALLED)):
                    self._slot(vars(base), key, value)
                    self.values[quoted(f"{name}.{key}")] = SameFunction(value) if isinstance(value, CALLED) else value
                elif _is_of_torch(value) or (isinstance(value, ModuleType) and is_users(value)):
                    self._value(f"{name}.{key}", value, deep)
                elif users and _is_value(value):
                    self._attribute(f"{name}.{key}", vars(base), key, value, deep)

    def _around(self, function: FunctionType) -> None:
        same = self._readers.setdefault(function.__qualname__, [])
        same.append(function)
        reader = function.__qualname__ if len(same) == 1 else f"{function.__qualname__}, {len(same)}"
        if looks_globals_up(function.__code__):
            self._sized.append(function.__globals__)
        for around in around_of(function):
            name, value = f"{around.name} (read by {reader})", around.value
            self._slot(around.holder, around.key, value)
            if is_users(value) or isinstance(value, FunctionType | BuiltinFunctionType) or _is_of_torch(value):
                self._value(name, value, _DEEP)
        for variable in map(SameVariable, environment_of(function)):
            self._compared.append(variable)
            self.values[f"the variable {variable.name!r} of the environment"] = variable.value

    def _tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.grad_fn is not None or isinstance(tensor, FakeTensor) or tensor.is_meta:
            return
        same = SameTensor(tensor)
        self._tensors.append(tensor)
        if same.values is not None:
            self._compared.append(same)
        self.values[quoted(name)] = same

    def _copied(self, name: str, value: Any) -> None:
        same = SameArray(np.ctypeslib.as_array(value) if isinstance(value, ctypes._SimpleCData) else np.asarray(value))
        self._compared.append(same)
        self.values[quoted(name)] = same

    def _array(self, name: str, array: np.ndarray[Any, Any] | np.generic) -> None:
        if np.asarray(array).dtype != object:
            same = SameArray(np.asarray(array))
            self._compared.append(same)
            self.values[quoted(name)] = same


class _Current:
    """A context variable, to be read as a container of one entry."""

    def __init__(self, of: ContextVar[Any]) -> None:
        self._of = of

    def __getitem__(self, _: int) -> Any:
        try:
            return self._of.get()
        except LookupError:
            return None


class _Attributes:
    """The attributes of an object without a dict, to be read as a container."""

    def __init__(self, of: object) -> None:
        self._of = of

    def __getitem__(self, key: str) -> Any:
        return getattr(self._of, key)


def _slots_of(kind: type) -> list[str]:
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__ if is_users(base)]
    names = [name for names in found for name in ((names,) if isinstance(names, str) else names)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(key: object) -> str:
    """Return its words without addresses, which differ from process to process."""
    return _ADDRESS.sub("", repr(key))


def quoted(name: str) -> str:
    """``'beta'``; ``'WEIGHT[0]' (read by forward)``."""
    own, reader, inside = name.partition(" (read by ")
    reader, _, inside = inside.partition(")") if reader else ("", "", "")
    return f"'{own}{inside}' (read by {reader})" if reader else f"'{own}'"


def _is_of_torch(value: object) -> bool:
    """Return whether it is a module of torch. What others than torch and the user have in modules may be loaded when it is first read."""
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch"


def _is_value(value: object) -> bool:
    return isinstance(value, (*_PLAIN, Tensor, np.ndarray, list, dict, tuple)) or (
        hasattr(value, "__dict__")
        and not callable(value)
        and not isinstance(value, property | classmethod | staticmethod)
    )


def _asks_more(kind: type) -> bool:
    """Return whether the mode of a library's module may decide more than what its ops do: any that is not torch's own."""
    return not kind.__module__.startswith("torch.nn.")
