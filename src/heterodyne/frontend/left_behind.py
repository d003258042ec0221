"""What forward computes from the batch or from weights and leaves in attributes of the model, or in variables around its functions.

A captured graph assigns nothing, and each rank would assign what it computed from its own shard of the batch. A model whose next forward
reads what is left is refused. What forward only sets is replaced, after each step, by an object that raises PlanError on every use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CellType, FunctionType
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from heterodyne.around_model import Kept, Root, defaults_of, functions_of, root_of
from heterodyne.code_read import is_filled
from heterodyne.errors import PlanError
from heterodyne.frontend.changes import PLAIN, Looked, place_of, refuse_kept

__all__ = ["LeftBehind", "SetByForward", "left_behind", "set_anew"]


_OF_BATCH = object()


@dataclass(kw_only=True, eq=False)
class LeftBehind:
    """A place that forward sets.

    Args:
        root: where to begin, in any copy of the model.
        steps: keys, and names of what they lead to, from there to the place.
        filled: it is a container that each forward makes longer.
        constant: each forward sets it to this number or word, of which no step changes anything; `_OF_BATCH`: to what
            depends on the batch.
    """

    root: Root
    steps: Sequence[tuple[Any, str]]
    filled: bool = False
    constant: object = _OF_BATCH

    @cached_property
    def _guard(self) -> SetByForward:
        return (FilledByForward if self.filled else SetByForward)(self.steps[-1][1])

    def guard(self, model: nn.Module) -> None:
        """Replace what depends on a batch by a `SetByForward`; where its container is not there, that."""
        if self.constant is _OF_BATCH:
            self._put(model, self._guard)

    def follow(self, model: nn.Module) -> None:
        """Set the constant, as forward does."""
        if self.constant is not _OF_BATCH:
            self._put(model, self.constant)

    def _put(self, model: nn.Module, value: object) -> None:
        holder = self._first_holder(model)
        for place, (key, _) in enumerate(self.steps, 1):
            inner = _get(holder, key)
            if place == len(self.steps) or not _may_hold(inner):
                break
            holder = inner
        if place < len(self.steps) and self.constant is not _OF_BATCH:
            return  # what a forward would make anew is not there
        if _get(holder, key) is not value:
            _set(holder, key, value)

    def _first_holder(self, model: nn.Module) -> Any:
        if not isinstance(self.root, tuple):
            return root_of(model, self.root)
        known = self.__dict__.setdefault("_holders", {})  # to read code at each step would cost
        if id(model) not in known:
            known[id(model)] = root_of(model, self.root)
        return known[id(model)]


def _may_hold(value: object) -> bool:
    return value is not None and not isinstance(value, int | float | str | bytes | tuple | Tensor | SetByForward)


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, CellType):
        return holder.cell_contents if is_filled(holder) else None
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list | deque):
        return holder[key] if key < len(holder) else None
    if isinstance(key, tuple):
        return list(getattr(holder, key[0]).values())[key[1]]
    if isinstance(holder, FunctionType) and isinstance(key, int):
        return defaults_of(holder)[key]
    return vars(holder).get(key) if isinstance(holder, type) else getattr(holder, key, None)


def _set(holder: Any, key: Any, value: object) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = value
    elif isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, list | deque):
        if key < len(holder):
            holder[key] = value
        else:
            holder.append(value)
    elif not isinstance(key, int):  # of a default, which a forward does not replace
        setattr(holder, key, value)


Run: TypeAlias = Callable[[int], tuple[Sequence[Tensor], Tensor] | None]
"""Runs forward on inputs of the first or the second number of samples, and gives them and the loss; None if it failed."""


def left_behind(model: nn.Module, before: Looked, run: Run, data: Iterable[Tensor]) -> list[LeftBehind]:
    """Return what forward leaves: tensors that depend on the batch or on trained weights, numbers, containers that it makes longer.

    Args:
        model: a copy of the user's model.
        before: what that kept before its first forward.
        data: the batch and the weights that are trained.

    Raises CaptureError if the next forward reads one of these, or if each forward changes a number.
    """
    functions = functions_of(model)
    flow, again = _Flow(), _Flow()
    flow.note(data, "data")
    with flow:
        run(0)
    first = Looked(model, functions)
    changed = first.changed(before)
    left = [kept for kept in changed if not isinstance(kept.value, PLAIN)]
    of_data = [k for k in left if not isinstance(k.value, Tensor) or "data" in flow.of(k.value)]
    for kept in of_data:
        if isinstance(kept.value, Tensor):
            again.note([kept.value], place_of(kept))
    with again:
        ran = run(0)
    second = Looked(model, functions)
    read = again.of(ran[1]) if ran else frozenset()
    for kept in (*(kept for kept in of_data if place_of(kept) in read), *second.counted(first)):
        refuse_kept(kept)
    longer = second.longer(first) if first.longer(before) else []
    growing = {id(kept.value) for kept in longer}
    numbers = [k for k in changed if isinstance(k.value, PLAIN) and id(k.holder) not in growing]
    if numbers:
        run(1)
    sized = {place_of(kept) for kept in Looked(model, functions).counted(second)} if numbers else set()
    constants = [kept for kept in numbers if place_of(kept) not in sized] if ran and len(left) == len(of_data) else []
    return [
        *_places([*of_data, *(kept for kept in numbers if place_of(kept) in sized)], longer),
        *(replace(_left(kept), constant=kept.value) for kept in constants),
    ]


def set_anew(model: nn.Module, before: Looked, run: Callable[[], object]) -> list[LeftBehind]:
    """Return the places that each forward sets to another tensor, and the containers that it makes longer. ``before``: what the model
    kept before its first forward; ``run``: runs another one. Raises CaptureError if each forward changes a number.
    """
    functions = functions_of(model)
    first = Looked(model, functions)
    if not first.changed(before) and not first.longer(before):
        return []
    run()
    second = Looked(model, functions)
    for kept in second.counted(first):
        refuse_kept(kept)
    return _places([kept for kept in second.changed(first) if isinstance(kept.value, Tensor)], second.longer(first))


def _places(found: Sequence[Kept], longer: Sequence[Kept]) -> list[LeftBehind]:
    within = {id(kept.value) for kept in longer}
    return [
        *(_left(kept) for kept in found if id(kept.holder) not in within),
        *(replace(_left(kept), filled=True) for kept in longer),
    ]


def _left(kept: Kept) -> LeftBehind:
    steps: list[tuple[Any, str]] = [(kept.key, kept.name)]
    while kept.outer is not None:
        kept = kept.outer
        steps.insert(0, (kept.key, kept.name))
    return LeftBehind(root=kept.root, steps=steps)


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors were computed from which of those that were noted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources: Any = WeakTensorKeyDictionary()

    def note(self, tensors: Iterable[Tensor], source: object) -> None:
        for tensor in tensors:
            self._sources[tensor] = self.of(tensor) | {source}

    def of(self, tensor: Tensor) -> frozenset[object]:
        found: frozenset[object] = self._sources.get(tensor, frozenset())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        sources = frozenset[object]().union(*map(self.of, given))
        found = func(*args, **(kwargs or {}))
        if sources:
            written = given[:1] if func._schema.is_mutable else []
            for tensor in (*pytree.tree_leaves(found), *written):
                if isinstance(tensor, Tensor):
                    self._sources[tensor] = self.of(tensor) | sources
        return found


class SetByForward:
    """The value of an attribute that forward sets. Every use of it raises PlanError."""

    def __init__(self, name: str) -> None:
        vars(self)["name"] = name

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise PlanError."""
        name = vars(self)["name"]
        raise PlanError(
            f"{name!r} has no value after a step: forward sets it, and the model runs as a captured graph, each device on its own samples. "
            "For the value of a batch call the model by hand (with trainer.whole_weights() as model: model(...)), or compute it of "
            "trainer.predict(batch)"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__torch_function__":
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = next(leaf for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, SetByForward))
        return found.refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> SetByForward:
        return self

    def __reduce__(self) -> tuple[type[SetByForward], tuple[str]]:
        return SetByForward, (vars(self)["name"],)

    def __repr__(self) -> str:
        return f"<{vars(self)['name']}, which forward sets>"


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
for _name in (
    *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
    *(
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__format__",
        "__str__",
        "__len__",
        "__iter__",
        "__getitem__",
        "__setitem__",
    ),
    *(
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__neg__",
        "__abs__",
        "__round__",
        "__array__",
        "__setattr__",
        "__call__",
    ),
):
    setattr(SetByForward, _name, SetByForward.refuse)


class FilledByForward(SetByForward):
    """A container that each forward makes longer. Every use but further writes raises PlanError."""

    def ignore(self, *_: object, **__: object) -> None:
        """Keep nothing of what is written."""

    append = extend = appendleft = extendleft = insert = add = update = setdefault = clear = ignore
    __setitem__ = ignore

    def __iadd__(self, _: object) -> FilledByForward:
        return self
