"""The ModelGraph: what a model is, without its weights and without torch.

Ops are listed in topological order, the order in which they were captured. Blocks are contiguous runs of ops that
together cover the graph: what stands before the first repeated layer, each repeated layer, what stands after the last.
Blocks of the same ``kind`` have the same ops, shapes and constants, so one of them is measured for all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from heterodyne.errors import PlanError
from heterodyne.graph.size import Size
from heterodyne.graph.task_graphs import TaskGraph

__all__ = [
    "Argument",
    "Block",
    "Input",
    "Loss",
    "ModelGraph",
    "ModuleOnly",
    "Op",
    "Parameter",
    "Ref",
    "TensorSpec",
    "dtype_bytes",
    "require_pieces",
]

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
        memory: for what lies in memory that an op writes into after it was made, which memory that is.
        in_memory: which outputs lie there; (): all of them.
        writes: the memories that it writes into; that of a parameter or buffer has its name.
        samples: for each output the dim in which its samples lie, in order; None where there is none, or not in order.
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


@dataclass(frozen=True, kw_only=True)
class Block:
    """A contiguous run of ops, ``[start, stop)``. Blocks of one ``kind`` are alike."""

    index: int
    name: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How the loss is averaged, which decides how the losses of unequal parts are added up (law 1).

    With ``mean`` the loss is a sum over the batch divided by a denominator D of it; parts of the batch are weighted by D(part) / D(batch).
    ``count`` says what D depends on: the number of ``samples``, or ``tokens`` (labels that are not ignored, a mask's sum: on the data).
    With ``sum`` every part has weight 1. With ``terms`` the loss adds terms with denominators of their own; the graph is given those of
    the whole batch, so every part has weight 1, and the graph must run in the place of the module. With ``coupled`` samples see each
    other in the loss: replicas exchange what it compares, and each has all its samples in one micro-batch.
    """

    reduction: Literal["mean", "sum", "terms", "coupled"]
    count: Literal["samples", "tokens"] = "samples"


@dataclass(frozen=True, kw_only=True)
class ModuleOnly:
    """Something that the module does in its backward and that no piece of its graph does: ``what``, and the line that says so."""

    what: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.source})" if self.source else self.what


@dataclass(frozen=True, kw_only=True)
class ModelGraph:
    """What the model is. Immutable; made by `heterodyne.capture`, read by everything that thinks.

    Args:
        name: the class of the model.
        inputs: what the user passes in.
        parameters, buffers: one entry each for what is stored once; tied names are aliases.
        ops: in topological order.
        blocks: contiguous, in order, covering all ops.
        loss: how the loss is averaged.
        batch_statistics: names of the ops that mix the samples of a micro-batch (BatchNorm in training).
        random: names of the ops that draw random numbers (dropout).
        constants: tensors of the trace that are no parameters or buffers.
        output: the loss; None: not told.
        task_graphs: what the author has marked, in the order of their first ops.
        module_only: why pieces of the graph would train in another way than the module. Not empty: each device runs it whole.
        opaque: why there is no graph of its ops, with the user's line: its one op is the module as it is. None: there is a graph.
    """

    name: str
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    blocks: tuple[Block, ...]
    loss: Loss
    batch_statistics: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    constants: tuple[Parameter, ...] = ()
    output: Ref | None = None
    task_graphs: tuple[TaskGraph, ...] = ()
    module_only: tuple[ModuleOnly, ...] = ()
    opaque: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if two tensors go by one name: what is said of the one would be taken for the other."""
        stored = {p.name for p in (*self.parameters, *self.buffers, *self.constants)}  # some buffers are constants too
        named = Counter([*stored, *(i.symbol for i in self.inputs), *(op.name for op in self.ops)])
        twice = [name for name, count in named.items() if count > 1]
        if twice:
            raise ValueError(
                f"the graph of {self.name} has more than one tensor of each of these names: {', '.join(twice)}"
            )

    def __hash__(self) -> int:
        # Much is kept by graph; to hash thousands of ops for each look-up would take longer than to find the answer.
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with ops, shapes, parameters or loss; not with where the source code stands."""
        content = asdict(self)
        del content["opaque"]
        for entry in content["inputs"]:
            if entry["symbol"] == entry["name"]:
                del entry["symbol"]
        for op in content["ops"]:
            del op["source"]
            if not op["in_memory"]:
                del op["in_memory"]
        for marked in (*content["task_graphs"], *content["module_only"]):
            del marked["source"]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def only_whole(self) -> str:
        """Why a plan may not cut the model, as a sentence with what to do; "" if it may."""
        if not self.module_only:
            return ""
        return (
            f"only the module itself trains as it should: {'; '.join(map(str, self.module_only))}, which no piece of its graph does. Let "
            "each device run the whole model (strategy: data, without recompute), or write it as ops that PyTorch differentiates "
            "(a straight-through estimate as x + (q - x).detach())"
        )

    @property
    def parameter_count(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        return sum(p.bytes for p in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        return sum(p.bytes for p in self.parameters if p.trainable)

    @property
    def buffer_bytes(self) -> int:
        return sum(b.bytes for b in self.buffers)

    def spec(self, ref: Ref) -> TensorSpec:
        """Shape and dtype of what an op reads. Raises KeyError if there is nothing of that name."""
        return self._specs[ref.name][ref.output]

    @cached_property
    def _specs(self) -> dict[str, tuple[TensorSpec, ...]]:
        stored = (*self.parameters, *self.buffers, *self.constants)
        return {
            **{p.name: (TensorSpec(shape=tuple(map(Size.of, p.shape)), dtype=p.dtype),) for p in stored},
            **{entry.symbol: (entry.spec,) for entry in self.inputs},
            **{op.name: op.outputs for op in self.ops},
        }

    @cached_property
    def stored(self) -> dict[str, Parameter]:
        """Parameters and buffers by name."""
        return {p.name: p for p in (*self.parameters, *self.buffers)}

    @cached_property
    def given(self) -> frozenset[str]:
        """The names of what is there before anything runs, but for the inputs: parameters, buffers, constants."""
        return frozenset(self.stored).union(p.name for p in self.constants)

    def flows(self, ref: Ref) -> bool:
        """Whether gradients flow into a tensor."""
        made = self.op_by_name.get(ref.name)
        if made is not None:
            return made.differentiable[ref.output]
        return ref.name in self.stored and self.stored[ref.name].trainable

    def memory_of(self, ref: Ref) -> str | None:
        """The memory in which something lies that something else may write into: what an op has made, an input, or what is stored."""
        made = self.op_by_name.get(ref.name)
        if made is None:
            return ref.name
        return made.memory if not made.in_memory or ref.output in made.in_memory else None

    @cached_property
    def op_by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def ops_of(self, block: Block) -> tuple[Op, ...]:
        return self.ops[block.start : block.stop]

    def flops_forward(self, block: Block | None = None) -> Size:
        """Forward FLOPs of a block, or of the whole graph."""
        return Size.total(op.flops_forward for op in (self.ops if block is None else self.ops_of(block)))

    def flops_backward(self, block: Block | None = None) -> Size:
        """Backward FLOPs of a block, or of the whole graph."""
        return Size.total(op.flops_backward for op in (self.ops if block is None else self.ops_of(block)))

    def bytes_saved(self, block: Block | None = None) -> Size:
        """Activation bytes kept from forward to backward by a block, or by the whole graph."""
        return Size.total(op.bytes_saved for op in (self.ops if block is None else self.ops_of(block)))

    def parameters_of(self, block: Block) -> tuple[Parameter, ...]:
        """The parameters that a block reads, in the order of `parameters`. A tied one appears in each block that reads it."""
        read = {name for op in self.ops_of(block) for name in op.parameters}
        return tuple(p for p in self.parameters if p.name in read)

    @cached_property
    def tied_across_blocks(self) -> frozenset[str]:
        """Names of the parameters and buffers that several blocks read."""
        readers = Counter(parameter.name for block in self.blocks for parameter in self.parameters_of(block))
        return frozenset(name for name, count in readers.items() if count > 1)

    @property
    def kind_names(self) -> dict[str, str]:
        """For each kind the name of its first block, and how many blocks there are of it: ``layers.0 (x4)``."""
        count = Counter(block.kind for block in self.blocks)
        return {kind: f"{b.name} (x{count[kind]})" if count[kind] > 1 else b.name for kind, b in self.kinds.items()}

    @cached_property
    def kinds(self) -> dict[str, Block]:
        """The first block of each kind, in order: what has to be measured."""
        first: dict[str, Block] = {}
        for block in self.blocks:
            first.setdefault(block.kind, block)
        return first


def require_pieces(graph: ModelGraph) -> None:
    """Raise PlanError if pieces of the graph would not train as the module does."""
    if graph.module_only:
        raise PlanError(graph.only_whole)
