"""The skeleton of a state as JSON and back: what is beside the tensors, with keys, order and types as they were.

JSON has neither tuples nor keys that are numbers, so what holds others says what it is: ``{"dict": [[key, value], ...]}``,
``{"list": [...]}``, ``{"tuple": [...]}``; a tensor is ``{"tensor": NAME}``, one in pieces
``{"pieces": [SHAPE, [[NAME, [[DIM, FIRST, STOP], ...], RANGE], ...]]}``, a number that is not finite ``{"float": "inf"}``.
"""

from __future__ import annotations

import math
from typing import Any

from heterodyne.errors import CheckpointError
from heterodyne.plan.boxes import Slice
from heterodyne.runtime.checkpoint.state_tree import Cut, Leaf
from heterodyne.runtime.weights.pieces import Place

__all__ = ["decoded", "encoded"]


def encoded(skeleton: Any, path: str = "state") -> Any:
    """JSON values. Raises CheckpointError, with the path, for anything but tensors, numbers, text, None, dicts, lists and tuples."""
    if isinstance(skeleton, Leaf):
        return {"tensor": skeleton.name}
    if isinstance(skeleton, Cut):
        return {"pieces": [skeleton.shape, [[name, of.box, of.range] for name, of in skeleton.places.items()]]}
    if isinstance(skeleton, dict):
        items = [[_key(key, path), encoded(item, f"{path}.{key}")] for key, item in skeleton.items()]
        return {"dict": items}
    if type(skeleton) in (list, tuple):
        items = [encoded(item, f"{path}[{index}]") for index, item in enumerate(skeleton)]
        return {type(skeleton).__name__: items}
    if isinstance(skeleton, float):
        return float(skeleton) if math.isfinite(skeleton) else {"float": str(float(skeleton))}
    if skeleton is None or isinstance(skeleton, bool | str) or type(skeleton) is int:
        return skeleton
    raise CheckpointError(
        f"{path} is a {type(skeleton).__qualname__}, which a checkpoint cannot hold: it holds tensors, numbers, text, None, and dicts, "
        "lists and tuples of them. Let state_dict() return those"
    )


def decoded(value: Any) -> Any:
    """The inverse of `encoded`. Raises ValueError for JSON that it did not write."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list without its type")
        return value
    if len(value) != 1:
        raise ValueError("a value of no type or of several")
    ((kind, content),) = value.items()
    if kind == "tensor" and isinstance(content, str):
        return Leaf(content)
    if kind == "pieces" and isinstance(content, list):
        shape, pieces = content
        return Cut(tuple(map(int, shape)), {str(name): _place(box, range) for name, box, range in pieces})
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind in ("list", "tuple") and isinstance(content, list):
        items = [decoded(item) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(content, list):
        return dict(_item(item) for item in content)
    raise ValueError(f"a value of the unknown type {kind!r}")


def _place(box: Any, range: Any) -> Place:
    start, stop = range or (0, 0)
    cuts = tuple(Slice(int(dim), int(first), int(last)) for dim, first, last in box)
    return Place(cuts, None if range is None else (int(start), int(stop)))


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str) or type(key) in (int, bool):
        return key
    raise CheckpointError(f"{path} has the key {key!r}, which a checkpoint cannot hold: keys are text or whole numbers")


def _item(item: Any) -> tuple[Any, Any]:
    if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], str | int)):
        raise ValueError("an entry of a dict that is no pair of a key and a value")
    return item[0], decoded(item[1])
