"""Graphs written by hand, op by op, for the rules and the search."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from heterodyne.graph import Argument, Block, Input, Loss, ModelGraph, Op, Parameter, Ref, Size, TensorSpec
from heterodyne.graph.sharding import Layout, Mode, Price, Problem

B = Size.per_sample(1)
Dim = int | Size


def shape_of(dims: Sequence[Dim]) -> tuple[Size, ...]:
    return tuple(dim if isinstance(dim, Size) else Size.of(dim) for dim in dims)


class Made:
    """A graph, as far as it is made. Each call returns what later ops are called with."""

    def __init__(self) -> None:
        self._inputs: list[Input] = []
        self._parameters: list[Parameter] = []
        self._buffers: list[Parameter] = []
        self._ops: list[Op] = []

    def input(self, *dims: Dim, dtype: str = "float32") -> Ref:
        name = f"x{len(self._inputs)}"
        self._inputs.append(Input(name=name, spec=TensorSpec(shape=shape_of(dims), dtype=dtype), batch_dim=0))
        return Ref(name)

    def parameter(self, *dims: int) -> Ref:
        name = f"w{len(self._parameters)}"
        self._parameters.append(Parameter(name=name, shape=dims, dtype="float32", trainable=True))
        return Ref(name)

    def buffer(self, *dims: int) -> Ref:
        name = f"c{len(self._buffers)}"
        self._buffers.append(Parameter(name=name, shape=dims, dtype="float32", trainable=False))
        return Ref(name)

    def op(
        self,
        kind: str,
        /,
        *dims: Dim,
        outputs: int = 1,
        flops: float = 0.0,
        dtype: str = "float32",
        flows: bool = True,
        memory: str | None = None,
        writes: tuple[str, ...] = (),
        **arguments: Argument,
    ) -> Ref:
        """An op that returns tensors of that shape; ``flops``: of a sample, forward."""
        operands = [value for value in arguments.values() if isinstance(value, Ref)]
        operands += [r for value in arguments.values() if isinstance(value, tuple) for r in value if isinstance(r, Ref)]
        stored = {entry.name for entry in (*self._parameters, *self._buffers)}
        spec = TensorSpec(shape=shape_of(dims), dtype=dtype)
        name = f"{kind}_{len(self._ops)}"
        self._ops.append(
            Op(
                name=name,
                target=kind if "." in kind else f"aten.{kind}.default",
                inputs=tuple(dict.fromkeys(ref.name for ref in operands if ref.name not in stored)),
                parameters=tuple(dict.fromkeys(ref.name for ref in operands if ref.name in stored)),
                outputs=(spec,) * outputs,
                differentiable=(flows,) * outputs,
                module="",
                source="model.py:1",
                flops_forward=Size.per_sample(flops),
                flops_backward=Size.per_sample(2 * flops),
                bytes_read=spec.bytes,
                bytes_written=spec.bytes,
                bytes_saved=Size(),
                arguments=tuple(arguments.items()),
                memory=memory,
                writes=writes,
                samples=(0,) * outputs,
            )
        )
        return Ref(name)

    def linear(self, x: Ref, rows: int, columns: int, *, bias: bool = False) -> Ref:
        """A linear layer on the last dim, with the operations that it takes."""
        before = self.spec(x).shape[:-1]
        weight = self.parameter(columns, rows)
        more = self.parameter(columns) if bias else None
        flops = 2 * columns * rows * prod(int(size(1)) for size in before)
        return self.op("linear", *before, columns, flops=flops, input=x, weight=weight, bias=more)

    def spec(self, ref: Ref) -> TensorSpec:
        return self.graph().spec(ref)

    def graph(self, *, layers: Sequence[int] = ()) -> ModelGraph:
        """``layers``: the first ops of its blocks, but for the first."""
        borders = [0, *layers, len(self._ops)]
        return ModelGraph(
            name="made",
            inputs=tuple(self._inputs),
            parameters=tuple(self._parameters),
            buffers=tuple(self._buffers),
            ops=tuple(self._ops),
            blocks=tuple(
                Block(index=n, name=str(n), kind="layer", start=a, stop=b) for n, (a, b) in enumerate(pairwise(borders))
            ),
            loss=Loss(reduction="mean"),
            output=Ref(self._ops[-1].name) if self._ops else None,
        )


def price(members: int = 2, *, unevenness: float = 2.0, latency: float = 64.0, flops_per_byte: float = 100.0) -> Price:
    return Price(members=members, unevenness=unevenness, latency_bytes=latency, flops_per_byte=flops_per_byte)


def problem(
    graph: ModelGraph,
    wanted: dict[Ref, Layout],
    *,
    mode: Mode | None = None,
    costs: Price | None = None,
    given: dict[Ref, Layout] | None = None,
) -> Problem:
    """Of all ops of a graph, in one region."""
    return Problem(
        graph=graph,
        ops=graph.ops,
        modes={op.name: mode or Mode("split") for op in graph.ops},
        given=given or {},
        wanted=wanted,
        samples=4,
        price=costs or price(),
    )
