"""Outputs of modules that the script looks at or changes while a plan runs the model: one op that stands for each of them in a graph.

A forward hook (`OutputHook`) puts every tensor that a module returns through ``heterodyne::module_output``. The op is in the graph that is
captured with the hook, so whatever device runs that piece of the graph runs it too, on whole tensors of its samples: where a stage is
sharded, they are gathered for it. It hands the tensor to whoever looks (`recorded`) and returns what the script makes of it (`edited`),
with autograd through it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from heterodyne.errors import PlanError

__all__ = ["Edit", "OutputHook", "Seen", "at_samples", "edited", "nested", "recorded", "result_of", "tensors_in"]

Edit = Callable[[Any], Any]
"""Gets what a module returns and gives what it shall return; None: the same."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor that a module has returned. ``key``: of the module's hook; ``form``, ``leaf``: its place in the output, see `nested`;
    ``call``: the number of the module's call in a forward; ``samples``: of the batch."""

    key: str
    form: str
    leaf: int
    call: int
    samples: range
    value: Tensor


_edits: dict[str, list[Edit]] = {}
_recording: list[list[Seen]] = []
_samples = range(0)
_calls: Counter[str] = Counter()


def at_samples(samples: range) -> None:
    """Say that a forward begins, and of which samples of the batch."""
    global _samples  # noqa: PLW0603  # the op has no other way to know
    _samples = samples
    _calls.clear()


@contextmanager
def recorded() -> Iterator[list[Seen]]:
    """Collect all outputs that are met while the block runs, detached copies."""
    seen: list[Seen] = []
    _recording.append(seen)
    try:
        yield seen
    finally:
        _recording.remove(seen)


@contextmanager
def edited(edits: Mapping[str, Edit]) -> Iterator[None]:
    """Let the modules of these hooks return what the functions make of their outputs, while the block runs; after those of outer blocks."""
    for key, edit in edits.items():
        _edits.setdefault(key, []).append(edit)
    try:
        yield
    finally:
        for key in edits:
            _edits[key].pop()


def module_output(x: Tensor, key: str, form: str, leaf: int, call: int, trains: bool) -> Tensor:
    """The op: what a module is to return in place of ``x``; ``trains``: an edit reads tensors that gradients flow to, whatever flows to
    ``x``. Raises PlanError for an edit that gives something of another form."""
    if isinstance(x, FakeTensor) or x.is_meta:
        made = x.clone()
        return made.requires_grad_() if trains and torch.is_grad_enabled() and not made.requires_grad else made
    made = x.clone()  # edits and what follows may write into it
    for edit in _edits.get(key, ()):
        made = result_of(edit, made, form, leaf, key)
    for seen in _recording:
        seen.append(Seen(key=key, form=form, leaf=leaf, call=call, samples=_samples, value=made.detach().clone()))
    return made


# An operator has to be known to PyTorch under its name before a graph can call it.
torch.library.define(
    "heterodyne::module_output", "(Tensor x, str key, str form, int leaf, int call, bool trains) -> Tensor"
)
torch.library.impl("heterodyne::module_output", "CompositeImplicitAutograd")(module_output)


class OutputHook:
    """A forward hook that puts the tensors of a module's output through the op. ``key``: by which edits and records know it; ``trains``:
    see `module_output`."""

    def __init__(self, key: str, *, trains: bool = False) -> None:
        self.key, self.trains = key, trains

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        del module, arguments
        return _shown(self, output)


def _shown(hook: OutputHook, output: Any) -> Any:
    form, tensors = tensors_in(output)
    call = _calls[hook.key]
    _calls[hook.key] += 1
    op = torch.ops.heterodyne.module_output
    made = iter([op(tensor, hook.key, form, leaf, call, hook.trains) for leaf, tensor in enumerate(tensors)])
    return _with_tensors(output, made)


def tensors_in(output: Any) -> tuple[str, Sequence[Tensor]]:
    """Return what an output is made of, as JSON, and the tensors in it. What is neither a tensor nor a plain value is None."""
    tensors: list[Tensor] = []
    form: list[Any] = []

    def walk(value: Any, keys: Sequence[int | str]) -> None:
        parts = _parts(value)
        if parts is not None:
            for key, part in parts:
                walk(part, [*keys, key])
        elif isinstance(value, Tensor):
            form.append([keys, True, len(tensors)])
            tensors.append(value)
        else:
            form.append([keys, False, value if type(value) in (bool, int, float, str) else None])

    walk(output, [])
    return json.dumps(form), tensors


def _parts(value: Any) -> list[tuple[int | str, Any]] | None:
    """Return by place or name what a value holds; None for what is not looked into."""
    if isinstance(value, tuple | list) and value:
        return list(enumerate(value))
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _with_tensors(output: Any, made: Iterator[Tensor]) -> Any:
    """Return a copy of an output with other tensors in the order of `tensors_in`."""
    if isinstance(output, Tensor):
        return next(made)
    parts = _parts(output)
    if parts is None:
        return output
    new = [_with_tensors(part, made) for _, part in parts]
    if isinstance(output, tuple):
        return type(output)(*new) if hasattr(output, "_fields") else tuple(new)
    if isinstance(output, list):
        return new
    copied = copy(output)
    for (key, _), part in zip(parts, new, strict=True):
        if isinstance(copied, MutableMapping):
            copied[key] = part
        else:
            object.__setattr__(copied, str(key), part)
    return copied


def nested(form: str, tensors: Sequence[Any]) -> Any:
    """Return an output of that form with these tensors: a tensor, or tuples and dicts of them, whatever classes the model has for both."""
    tree: Any = None
    for keys, is_tensor, value in json.loads(form):
        tree = _put(tree, keys, tensors[value] if is_tensor else value)
    return _as_tuples(tree)


class _Sequence(dict[int, Any]):
    """A tuple or list, by place."""


def _put(tree: Any, keys: Sequence[int | str], value: Any) -> Any:
    if not keys:
        return value
    if tree is None:
        tree = _Sequence() if isinstance(keys[0], int) else {}
    tree[keys[0]] = _put(tree.get(keys[0]), keys[1:], value)
    return tree


def _as_tuples(tree: Any) -> Any:
    if isinstance(tree, _Sequence):
        return tuple(_as_tuples(tree[place]) for place in sorted(tree))
    return {key: _as_tuples(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def result_of(edit: Edit, x: Tensor, form: str, leaf: int, key: str) -> Tensor:
    """Return what an edit makes of the tensor. Raises PlanError if it is of another form, shape or dtype."""
    holes = [None] * leaf + [x]
    output = nested(form, holes)
    made = edit(output)
    if made is None:
        return x
    new_form, tensors = tensors_in(made)
    if [entry[:2] for entry in json.loads(new_form)] != [entry[:2] for entry in json.loads(form)]:
        raise PlanError(
            f"the edit of {key!r} returns {_words(made)} where the module returns {_words(output)}: return the same form, or None to "
            "leave it as it is"
        )
    found = tensors[leaf]
    if found.shape != x.shape or found.dtype != x.dtype:
        raise PlanError(
            f"the edit of {key!r} makes {_words(found)} of {_words(x)}: what follows is planned for that shape and type; return the same"
        )
    return found


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | dict) else "")
