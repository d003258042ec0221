"""Tensors that forward computes from the batch or from weights and assigns to attributes of the model.

A captured graph does not assign attributes, and each rank would assign what it computed from its own shard of the batch. A model whose next
forward reads such an attribute is refused. Attributes that forward only sets are replaced by an object that raises PlanError on every use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from heterodyne.errors import PlanError
from heterodyne.frontend.changes import entry_name, kept_in

__all__ = ["Place", "SetByForward", "leave", "left_behind", "tensors_of"]

Place: TypeAlias = tuple[str, str, object]
"""The path of a module, an attribute of it, and the key or index there; None: the attribute itself."""


def tensors_of(model: nn.Module) -> dict[Place, Tensor]:
    """Return the tensors that its modules keep as attributes, or in lists, tuples and dicts there; parameters and buffers are none."""
    return {
        (path, attribute, key): value
        for path, module in model.named_modules()
        for attribute, key, value in kept_in(module)
        if isinstance(value, Tensor)
    }


def left_behind(
    model: nn.Module, run: Callable[[], tuple[Sequence[Tensor], Tensor]], data: Callable[[], Iterable[Tensor]]
) -> tuple[list[Place], list[Place]]:
    """Return the places where forward leaves tensors that depend on the batch or on trained weights, and of these those that the loss of
    the next forward depends on.

    Args:
        run: runs forward, and gives the inputs and the loss. ``data``: tensors besides the inputs that count.
    """
    before = tensors_of(model)
    flow = _Flow()
    flow.note(data(), "data")
    with flow:
        inputs, _ = run()
    del inputs
    left = [
        place
        for place, tensor in tensors_of(model).items()
        if tensor is not before.get(place) and "data" in flow.of(tensor)
    ]
    if not left:
        return [], []
    again, now = _Flow(), tensors_of(model)
    for place in left:
        again.note([now[place]], place)
    with again:
        _, loss = run()
    return left, [place for place in left if place in again.of(loss)]


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


def leave(model: nn.Module, places: Iterable[Place]) -> None:
    """Replace the value in each place by a `SetByForward`."""
    for path, attribute, key in places:
        owner = model.get_submodule(path)
        name = ".".join(part for part in (path, entry_name(attribute, key)) if part)
        kept = vars(owner).get(attribute)
        if isinstance(kept, dict) and key is not None:
            kept[key] = SetByForward(name)
        elif isinstance(kept, list) and isinstance(key, int):
            kept[key : key + 1] = [SetByForward(name)]
        else:
            setattr(owner, attribute, SetByForward(name.partition("[")[0]))


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
