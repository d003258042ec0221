"""The ModelGraph: what a model is, without its weights and without torch.

Ops are listed in topological order, the order in which they were captured. Blocks are contiguous runs of ops that
together cover the graph: what stands before the first repeated layer, each repeated layer, what stands after the last.
Blocks of the same ``kind`` have the same ops, shapes and constants, so one of them is measured for all.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from heterodyne.errors import PlanError
from heterodyne.graph.op import Argument, Input, Op, Parameter, Ref, TensorSpec, dtype_bytes
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
    other in the loss: replicas exchange what it compares, once all micro-batches have run forward.
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
        output: the loss; None: not known.
        task_graphs: what the author has marked, in the order of their first ops.
        module_only: why pieces of the graph would train in another way than the module. Not empty: each device runs it whole.
        together_from: the first op that sees the samples of the whole batch, where the loss is ``coupled``; None: there is none, or no
            micro-batches may be made.
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
    together_from: int | None = None
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
        if self.together_from is None:
            del content["together_from"]
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
        """Return why a plan may not cut the model, as a sentence with what to do; "" if it may."""
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
        """Return whether gradients flow into a tensor."""
        made = self.op_by_name.get(ref.name)
        if made is not None:
            return made.differentiable[ref.output]
        return ref.name in self.stored and self.stored[ref.name].trainable

    @cached_property
    def reached(self) -> frozenset[str]:
        """The parameters that the gradient of the loss may reach: on one device all others have none, as behind a ``detach``."""
        found: set[str] = set()
        wanted = {self.output}
        for op in reversed(self.ops):
            flowing = {Ref(op.name, number) for number, flows in enumerate(op.differentiable) if flows}
            if flowing and (op.writes or not flowing.isdisjoint(wanted)):  # what is written is read under another name
                wanted.update(op.operands)
                found.update(op.parameters)
        return frozenset(found) if self.output is not None else frozenset(self.stored)

    def memory_of(self, ref: Ref) -> str | None:
        """The memory in which something is that something else may write into: what an op has made, an input, or what is stored."""
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
