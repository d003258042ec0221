"""A graph of two kinds of block, by hand, and a request to measure it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from heterodyne.cluster import Cluster
from heterodyne.graph.ir import Block, Loss, ModelGraph, Op, Parameter, TensorSpec
from heterodyne.graph.size import ZERO, Size
from heterodyne.measure import BlockProgram, Request, Sampling


def graph_of(kinds: tuple[str, ...], name: str = "Fake") -> ModelGraph:
    """A block of one op and one parameter for each name, in order."""
    spec = TensorSpec(shape=(Size.per_sample(1), Size.of(4)), dtype="float32")
    ops = tuple(
        Op(
            name=f"op{i}", target="aten.linear.default", inputs=(), parameters=(f"w{i}",), outputs=(spec,), differentiable=(True,),
            module="", source="",
            flops_forward=ZERO, flops_backward=ZERO, bytes_read=ZERO, bytes_written=ZERO, bytes_saved=Size.per_sample(16),
        )
        for i in range(len(kinds))
    )  # fmt: skip
    return ModelGraph(
        name=name,
        inputs=(),
        parameters=tuple(Parameter(name=f"w{i}", shape=(64, 64), dtype="float32", trainable=True) for i in range(len(kinds))),
        buffers=(),
        ops=ops,
        blocks=tuple(Block(index=i, name=f"{kind}s.{i}", kind=kind, start=i, stop=i + 1) for i, kind in enumerate(kinds)),
        loss=Loss(reduction="mean"),
    )  # fmt: skip


def request_of(programs: Mapping[str, BlockProgram], *, cluster: Cluster, **changes: object) -> Request:
    kinds = tuple(kind for kind in programs if kind != "*")
    values: dict[str, object] = {
        "graph": graph_of(kinds),
        "programs": programs,
        "cluster": cluster,
        "device": torch.device("cpu"),
        "micro_batch_sizes": (1, 2),
        "sampling": Sampling(warm_up=1, sample_s=0.002, samples=3, section_s=0.0),
        **changes,
    }
    return Request(**values)  # type: ignore[arg-type]
