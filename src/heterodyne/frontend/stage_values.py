"""What crosses between the stages of a pipeline, tensor by tensor, and which cuts would change the result.

`heterodyne.graph.crossings` says the same in ops, for the planner. Here memory that is written into is looked at too: a tensor
is sent as it is when its stage ends, and a stage that writes into what it received writes into a copy of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, fx

from heterodyne.errors import PlanError
from heterodyne.frontend.aliases import Aliases, shared_memory
from heterodyne.frontend.arguments import argument, mutates, operator_name
from heterodyne.frontend.describe import differentiable, producer_of
from heterodyne.frontend.export import Traced
from heterodyne.frontend.faults import line_of
from heterodyne.frontend.replay import Observed
from heterodyne.frontend.sample_order import Samples, samples_in
from heterodyne.frontend.sizes import spec_of
from heterodyne.graph import ModelGraph, Value, computed_again

__all__ = ["CuttableGraph", "values_between"]


@dataclass(frozen=True, kw_only=True)
class CuttableGraph:
    """A traced graph and what has to be known of it to cut it anywhere."""

    traced: Traced
    observed: dict[fx.Node, Observed]
    graph: ModelGraph

    @cached_property
    def memory(self) -> Aliases:
        """Return which tensors may share memory."""
        return shared_memory(self.traced.graph, self.observed)

    @cached_property
    def samples(self) -> Mapping[fx.Node, Samples]:
        """Return where the samples of each tensor are."""
        return samples_in(self.traced.graph)

    @cached_property
    def position(self) -> Mapping[fx.Node, int]:
        """The place of each op in the graph."""
        return {op: position for position, op in enumerate(self.traced.ops)}

    @cached_property
    def again(self) -> frozenset[fx.Node]:
        """The ops that each stage makes again for itself."""
        named = computed_again(self.graph)
        return frozenset(op for op in self.traced.ops if op.name in named)


def values_between(pieces: CuttableGraph, starts: Sequence[int]) -> tuple[Value, ...]:
    """Return what crosses between stages whose first ops are ``starts``, in the order in which it is made.

    Raises PlanError, with op and line, for a cut that would let a stage read what another has written over since.
    """
    readers = _readers(pieces, starts)
    _refuse_split_buffers(pieces, starts)
    _refuse_split_writes(pieces, starts, readers)
    return tuple(_value(pieces, starts, node, tuple(sorted(stages))) for node, stages in readers.items())


def _stage(pieces: CuttableGraph, starts: Sequence[int], node: fx.Node) -> int:
    return bisect_right(starts, pieces.position[producer_of(node)]) - 1


def _readers(pieces: CuttableGraph, starts: Sequence[int]) -> dict[fx.Node, set[int]]:
    """For each tensor that crosses, the stages that read it; in the order in which they are made."""
    readers: dict[fx.Node, set[int]] = {}
    for op in pieces.traced.ops:
        if op in pieces.again:
            continue
        stage = _stage(pieces, starts, op)
        for source in op.all_input_nodes:
            producer = producer_of(source)
            crosses = producer in pieces.position and producer not in pieces.again
            if crosses and _stage(pieces, starts, source) != stage:
                readers.setdefault(source, set()).add(stage)
    return {node: readers[node] for node in pieces.traced.graph.nodes if node in readers}


def _value(pieces: CuttableGraph, starts: Sequence[int], node: fx.Node, consumers: tuple[int, ...]) -> Value:
    traced = node.meta["val"]
    assert isinstance(traced, Tensor), f"{node.name} is no tensor"
    spec, samples = spec_of(traced), pieces.samples[node]
    producer = _stage(pieces, starts, node)
    written = [w for w in pieces.memory.writers_of(node) if _stage(pieces, starts, w) == producer]
    return Value(
        name=node.name,
        producer=producer,
        consumers=consumers,
        shape=spec.shape,
        dtype=spec.dtype,
        batch_dim=samples.dim,
        rows_a_sample=samples.rows,
        ordered=samples.ordered,
        differentiable=any(differentiable(pieces.traced, pieces.observed, n) for n in (node, *written)),
        source=line_of(node),
    )


def _refuse_split_buffers(pieces: CuttableGraph, starts: Sequence[int]) -> None:
    """A buffer that forward changes belongs to one stage: the others would keep what they had."""
    for node, role in pieces.traced.roles.items():
        if role.kind != "buffer":
            continue
        users = [op for op in pieces.traced.ops if node in op.all_input_nodes]
        stages = sorted({_stage(pieces, starts, op) for op in users})
        if len(stages) > 1 and any(_changes(op, node) for op in users):
            last = next(op for op in users if _stage(pieces, starts, op) == stages[-1])
            raise _refused(last, f"reads {role.name!r}, which forward changes in stage {stages[0]}", stages[-1])


def _changes(op: fx.Node, buffer: fx.Node) -> bool:
    statistics = (argument(op, "running_mean"), argument(op, "running_var"))
    return buffer in mutates(op) or ("norm" in operator_name(op) and buffer in statistics)


def _refuse_split_writes(pieces: CuttableGraph, starts: Sequence[int], readers: Mapping[fx.Node, set[int]]) -> None:
    """Nobody may read what a stage has written over in its own copy, nor two tensors that should have changed together."""
    for group, writers in pieces.memory.writers.items():
        own = [writer for writer in writers if writer not in pieces.again]
        for writer in own:
            stage = _stage(pieces, starts, writer)
            for node, stages in readers.items():
                if pieces.memory.group_of.get(node) is not group:
                    continue
                later = [reader for reader in stages if _stage(pieces, starts, node) < stage < reader]
                if later:
                    raise _refused(writer, f"writes over {node.name!r}, which stage {later[0]} reads too", stage)
            if len(_from_outside(pieces, starts, readers, group, stage)) > 1:
                raise _refused(writer, "writes over memory that several tensors share which cross the cut", stage)
        _refuse_split_inputs(pieces, starts, group, own)


def _from_outside(
    pieces: CuttableGraph, starts: Sequence[int], readers: Mapping[fx.Node, set[int]], group: fx.Node, stage: int
) -> list[fx.Node]:
    """Return what a stage is given of a group: tensors that it receives, inputs of the model that it reads."""
    received = [n for n, stages in readers.items() if stage in stages and pieces.memory.group_of.get(n) is group]
    inputs = [n for n in _inputs(pieces, group) if any(_stage(pieces, starts, op) == stage for op in _ops(pieces, n))]
    return received + inputs


def _refuse_split_inputs(
    pieces: CuttableGraph, starts: Sequence[int], group: fx.Node, writers: Sequence[fx.Node]
) -> None:
    for node in _inputs(pieces, group):
        for writer in writers:
            stage = _stage(pieces, starts, writer)
            for op in _ops(pieces, node):
                if _stage(pieces, starts, op) > stage:
                    raise _refused(writer, f"writes over the input {node.name!r}, which a later stage reads too", stage)


def _inputs(pieces: CuttableGraph, group: fx.Node) -> list[fx.Node]:
    return [n for n, role in pieces.traced.roles.items() if role.kind == "input" and pieces.memory.group_of[n] is group]


def _ops(pieces: CuttableGraph, source: fx.Node) -> list[fx.Node]:
    return [user for user in source.users if user in pieces.position]


def _refused(op: fx.Node, what: str, stage: int) -> PlanError:
    place = f"{line}\n" if (line := line_of(op, full=True)) else ""
    return PlanError(
        f"{place}{op.target} ({op.name}) in stage {stage} {what}, and each stage has its own copy. Cut before or after all of these "
        "ops, so that one stage holds them, or do it out of place (x = x + y, not x += y)"
    )
