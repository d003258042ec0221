"""Ops and the tensors that they read and return: what a `ModelGraph` is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from heterodyne.graph.size import Size

__all__ = ["Argument", "Input", "Op", "Parameter", "Ref", "TensorSpec", "dtype_bytes"]

_DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises KeyError for a dtype that is not in the table."""
    return _DTYPE_BYTES[dtype]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Shape and dtype. ``shape`` holds a Size a dim; the dims that follow the batch are not constant."""

    shape: tuple[Size, ...]
    dtype: str

    @cached_property
    def numel(self) -> Size:
        product = Size.of(1)
        for dim in self.shape:
            product = product * dim
        return product

    @cached_property
    def bytes(self) -> Size:
        return self.numel * dtype_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor that the user passes in. ``batch_dim`` is None for one that does not follow the batch.

    ``symbol``: its name in the graph; another one than ``name`` where a parameter or buffer has that.
    """

    name: str
    spec: TensorSpec
    batch_dim: int | None
    symbol: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "symbol", self.symbol or self.name)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter or a buffer; ``aliases`` are the other names that are tied to it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        product = 1
        for dim in self.shape:
            product *= dim
        return product

    @property
    def bytes(self) -> int:
        return self.numel * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor that an op reads: an output of the op ``name``, or the input, parameter, buffer or constant of that name.

    No two of these have one name, whatever the user calls them: parameters, buffers and constants keep theirs, an input that is called
    as one of them has another `Input.symbol`, and so have ops.
    """

    name: str
    output: int = 0


Argument: TypeAlias = "Ref | Size | bool | int | float | str | tuple[Argument, ...] | None"
"""What an op is called with. Sizes that follow the batch are `Size`; dtypes, devices and the like are their text."""


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op of the graph.

    Args:
        name: unique in the graph, among all tensors (`Ref`).
        target: the operator, as ``aten.linear.default``.
        inputs: names of the ops and symbols of the inputs that it reads, in order.
        parameters: names of the parameters and buffers that it reads (canonical names, not aliases).
        outputs: one spec for each tensor that it returns.
        differentiable: for each of them, whether gradients flow through it.
        module: the path of the module that called it ("model.layers.3.mlp"), "" for the root.
        source: "file.py:12" of the user's line, "" where unknown.
        flops_forward, flops_backward: floating point operations (a multiply-add counts 2).
        bytes_read, bytes_written: memory traffic of the forward.
        bytes_saved: what it alone keeps for its backward (tensors that an earlier op already keeps are not counted).
        annotation: name of the TaskGraph that it belongs to, if any.
        arguments: by the names of the operator's schema, defaults included.
        memory: for what is in memory that an op writes into after it was made, which memory that is.
        in_memory: which outputs are there; (): all of them.
        writes: the memories that it writes into; that of a parameter or buffer has its name.
        samples: for each output the dim in which its samples are, in order; None where there is none, or not in order.
    """

    name: str
    target: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    differentiable: tuple[bool, ...]
    module: str
    source: str
    flops_forward: Size
    flops_backward: Size
    bytes_read: Size
    bytes_written: Size
    bytes_saved: Size
    annotation: str | None = None
    arguments: tuple[tuple[str, Argument], ...] = ()
    memory: str | None = None
    in_memory: tuple[int, ...] = ()
    writes: tuple[str, ...] = ()
    samples: tuple[int | None, ...] = ()

    def argument(self, name: str) -> Argument:
        """The value of an argument; None if there is none of that name."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Argument]:
        return dict(self.arguments)

    @cached_property
    def operands(self) -> tuple[Ref, ...]:
        """The tensors that it reads, in the order of the call; one that is passed twice is there twice."""
        return tuple(_refs(value for _, value in self.arguments))

    @property
    def kind(self) -> str:
        """The operator without its overload: ``linear`` for ``aten.linear.default``."""
        return self.target.split(".")[1] if self.target.count(".") else self.target


def _refs(values: Iterable[Argument]) -> Iterator[Ref]:
    for value in values:
        if isinstance(value, Ref):
            yield value
        elif isinstance(value, tuple):
            yield from _refs(value)
