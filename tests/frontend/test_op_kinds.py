"""Each op does to values what its kind says: the table is read wherever values are followed through a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heterodyne.graph import op_kinds as kinds

CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "_to_copy": lambda op, x: op(x, dtype=torch.float64),
    "to": lambda op, x: op(x, torch.float64),
    "_unsafe_view": lambda op, x: op(x, [4, 3, 2]),
    "view": lambda op, x: op(x, [4, 3, 2]),
    "reshape": lambda op, x: op(x, [4, 3, 2]),
    "unflatten": lambda op, x: op(x, 2, [2, 2]),
    "unsqueeze": lambda op, x: op(x, 1),
    "squeeze": lambda op, x: op(x[:1]),
    "movedim": lambda op, x: op(x, 0, 2),
    "permute": lambda op, x: op(x, [2, 0, 1]),
    "swapaxes": lambda op, x: op(x, 0, 2),
    "swapdims": lambda op, x: op(x, 0, 2),
    "transpose": lambda op, x: op(x, 0, 2),
    "t": lambda op, x: op(x[0]),
    "expand": lambda op, x: op(x[:, :1], [2, 3, 4]),
    "broadcast_to": lambda op, x: op(x[:, :1], [2, 3, 4]),
    "chunk": lambda op, x: op(x, 2),
    "narrow": lambda op, x: op(x, 1, 1, 2),
    "select": lambda op, x: op(x, 1, 1),
    "slice": lambda op, x: op(x, 2, 1, 4, 2),
    "split": lambda op, x: op(x, 2, 2),
    "split_with_sizes": lambda op, x: op(x, [1, 2], 1),
    "unbind": lambda op, x: op(x, 1),
}
X = torch.arange(24.0).view(2, 3, 4)


def called(name: str, x: Tensor) -> Any:
    return CALLS.get(name, lambda op, value: op(value))(getattr(torch.ops.aten, name), x)


@pytest.mark.parametrize("name", sorted(kinds.COPIES | kinds.CASTS | kinds.RESHAPES | kinds.SQUEEZES))
def test_elements_stay_in_their_order(name: str) -> None:
    assert called(name, X).flatten().tolist() == (X[:1] if name == "squeeze" else X).flatten().tolist()


@pytest.mark.parametrize("name", sorted(kinds.TRANSPOSES))
def test_transposed_elements_are_all_there_once(name: str) -> None:
    assert sorted(called(name, X).flatten().tolist()) == (X[0] if name == "t" else X).flatten().tolist()


@pytest.mark.parametrize("name", sorted(kinds.EXPANDS))
def test_expanded_elements_are_those_of_the_tensor(name: str) -> None:
    assert set(called(name, X).flatten().tolist()) == set(X[:, :1].flatten().tolist())


@pytest.mark.parametrize("name", sorted(kinds.LIKE))
def test_the_other_tensor_says_shape_and_dtype_alone(name: str) -> None:
    op, x = getattr(torch.ops.aten, name), X[:, :, :1]
    shape = (3, 2, 1) if name in ("view_as", "reshape_as") else (2, 3, 4)
    of_zeros, of_others = (op(x, fill(shape, dtype=torch.float64)) for fill in (torch.zeros, torch.rand))
    assert torch.equal(of_zeros, of_others)
    assert set(of_zeros.flatten().tolist()) == set(x.flatten().tolist())


@pytest.mark.parametrize("name", sorted(kinds.SLICES))
def test_what_is_cut_out_was_in_the_tensor(name: str) -> None:
    parts = called(name, X)
    values = [value for part in ([parts] if isinstance(parts, Tensor) else parts) for value in part.flatten().tolist()]
    assert set(values) <= set(X.flatten().tolist())
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("name", sorted(kinds.JOINS))
def test_joined_elements_are_those_of_all_tensors(name: str) -> None:
    joined = getattr(torch.ops.aten, name)([X, X + 24])
    assert sorted(joined.flatten().tolist()) == list(range(48))
