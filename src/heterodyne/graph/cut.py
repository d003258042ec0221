"""What crosses the cuts when a graph is cut into stages.

A stage is a contiguous run of ops. A value crosses from the stage that makes it to each later stage that reads it, straight,
however many stages are between. The model's inputs do not cross: every device can read its samples of them. Nor does what is
cheap to make from the inputs alone and needs no gradient, such as masks and positions: a stage that reads it makes it again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from heterodyne.graph.ir import ModelGraph, Op, TensorSpec
from heterodyne.graph.module_outputs import MODULE_OUTPUT
from heterodyne.graph.size import Size

__all__ = ["Crossing", "Value", "computed_again", "crossings", "mixing_samples", "stage_ops"]

_FLOPS_A_BYTE = 64  # to send a byte over a fast link takes longer than so many operations take on a slow device


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """What an op of stage ``producer`` makes and the stages ``consumers`` (later ones, in order) read.

    ``specs``: those of its outputs that they read; ``differentiable``: gradients come back for them.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    differentiable: bool

    @property
    def bytes(self) -> Size:
        """The bytes of these outputs, by the number of samples."""
        return Size.total(spec.bytes for spec in self.specs)

    @property
    def narrow_bytes(self) -> Size:
        """The same between devices that compute in 16 bits: activations in fp32 go in 16 bits."""
        scale = 0.5 if self.differentiable else 1.0
        return Size.total(spec.bytes * scale if spec.dtype == "float32" else spec.bytes for spec in self.specs)


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor that crosses between stages.

    Args:
        name: of the node that makes it; unique in the graph.
        producer: the stage that makes it.
        consumers: the later stages that read it, in order.
        shape, dtype: as it was traced; it is sent in this dtype also where autocast has made another; activations in
            fp32 between devices that compute in 16 bits in 16 bits.
        batch_dim: the dim whose size is ``rows_a_sample`` times the number of samples; None if there is none. With ``ordered``,
            None says that the value is the same for every slice of the batch.
        rows_a_sample: rows of that dim for each sample.
        ordered: whether sample i has rows ``i * rows_a_sample`` to ``(i + 1) * rows_a_sample``. If not, samples cannot be cut out
            of it or put together, and producer and consumers must hold the same samples.
        differentiable: gradients come back for it.
        source: the line of the model that makes it.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[Size, ...]
    dtype: str
    batch_dim: int | None
    rows_a_sample: int
    ordered: bool
    differentiable: bool
    source: str = ""


def crossings(graph: ModelGraph, starts: Sequence[int]) -> tuple[Crossing, ...]:
    """Return what crosses between stages whose first ops are ``starts`` (rising, the first is 0), in the order in which it is made."""
    stage_of = [bisect_right(starts, position) - 1 for position in range(len(graph.ops))]
    again = computed_again(graph)
    made_by = {op.name: position for position, op in enumerate(graph.ops)}
    readers: dict[int, set[int]] = {}
    read: dict[int, set[int]] = {}
    for position, op in enumerate(graph.ops):
        for source in _sources(op, made_by, again):
            if stage_of[source] != stage_of[position]:
                readers.setdefault(source, set()).add(stage_of[position])
                own = {ref.output for ref in op.operands if ref.name == graph.ops[source].name}
                read.setdefault(source, set()).update(own or range(len(graph.ops[source].outputs)))
    return tuple(
        Crossing(
            name=graph.ops[source].name,
            producer=stage_of[source],
            consumers=tuple(sorted(readers[source])),
            specs=tuple(graph.ops[source].outputs[n] for n in sorted(read[source])),
            differentiable=any(graph.ops[source].differentiable[n] for n in read[source]),
        )
        for source in sorted(readers)
    )


def mixing_samples(graph: ModelGraph) -> frozenset[str]:
    """The ops of whose outputs no samples can be cut out, though they are made of them: a mean over all, samples behind another dim.

    A tensor that depends on no input of the batch is the same for every sample, so it is not among them; nor is an op without gradient
    and of constant shape, which may be either: stages are refused when they are built if such a one cannot be cut.
    """
    of_samples = {given.name for given in graph.inputs if given.batch_dim is not None}
    found = set()
    for op in graph.ops:
        if of_samples.isdisjoint(op.inputs):
            continue
        of_samples.add(op.name)
        for dim, spec in zip(op.samples, op.outputs, strict=False):
            if dim is None and (any(op.differentiable) or not all(size.is_constant for size in spec.shape)):
                found.add(op.name)
    return frozenset(found)


def computed_again(graph: ModelGraph) -> frozenset[str]:
    """The ops that each stage makes again for itself: no gradient, no chance, no weight but buffers, and all behind them are such.

    What is in memory that another op writes into is made again only with all of these ops. What writes into a buffer is not among
    them either: it is done once.
    """
    random = set(graph.random)
    stored = {p.name for p in graph.parameters}
    kept = stored | {b.name for b in graph.buffers}
    again: dict[str, Size] = {}  # with the operations that it takes, from the inputs on
    read = {name for op in graph.ops for name in op.inputs}
    for op in graph.ops:
        if op.kind == MODULE_OUTPUT and op.name not in read:  # but there to be seen
            continue
        sources = [name for name in op.inputs if name in graph.op_by_name]
        if op.name in random or op.name in graph.batch_statistics or any(op.differentiable):
            continue
        if any(name in stored for name in op.parameters) or any(name not in again for name in sources):
            continue
        flops = Size.total([op.flops_forward, *(again[name] for name in sources)])
        size = Size.total(spec.bytes for spec in op.outputs)
        if flops(1) <= _FLOPS_A_BYTE * max(1.0, size(1)) and not kept.intersection(op.writes):
            again[op.name] = flops
    return _with_whole_memories(graph, set(again))


def _with_whole_memories(graph: ModelGraph, found: set[str]) -> frozenset[str]:
    """Without those that share written memory with others that are not made again, and without what reads these."""
    together: dict[str, set[str]] = {}
    for op in graph.ops:
        for memory in {op.memory, *op.writes} - {None}:
            together.setdefault(str(memory), set()).add(op.name)
    while True:
        lost = {
            name
            for name in found
            if any(source in graph.op_by_name and source not in found for source in graph.op_by_name[name].inputs)
            or not together.get(graph.op_by_name[name].memory or "", set()) <= found
        }
        if not lost:
            return frozenset(found)
        found -= lost


def stage_ops(graph: ModelGraph, start: int, stop: int) -> tuple[Op, ...]:
    """Return what a stage with the ops ``[start, stop)`` runs: its own, and those that it makes again because they are read."""
    again = computed_again(graph)
    position = {op.name: place for place, op in enumerate(graph.ops)}
    writers: dict[str, list[str]] = {}
    for op in graph.ops:
        for memory in op.writes:
            if op.name in again and position[op.name] < stop:
                writers.setdefault(memory, []).append(op.name)
    waiting = [op.name for op in graph.ops[start:stop] if op.name not in again]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for source in graph.op_by_name[name].inputs:
            if source in again:
                waiting.append(source)
            made = graph.op_by_name.get(source)
            waiting += writers.get(source if made is None else made.memory or "", [])
    return tuple(op for op in graph.ops if op.name in found)


def _sources(op: Op, made_by: dict[str, int], again: frozenset[str]) -> list[int]:
    """The ops whose outputs an op reads; none for one that is made again wherever it is read."""
    if op.name in again:
        return []
    return [made_by[name] for name in op.inputs if name in made_by and name not in again]
