"""A model that no graph can hold: one op, which is the module as it is.

Data parallelism needs no graph: each device runs the whole module for its share of the batch. What has to be known of it is what the
loss divides by, whether forward draws random numbers, and whether it has BatchNorm in training. The first is given by the user
(`CountGiven`) or found by tracing the loss alone (`frontend.loss_alone`), the others are seen when it runs (`runtime.exact.parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError, PlanError
from heterodyne.frontend.example import Batch, Example, read_example
from heterodyne.frontend.export import tied_names
from heterodyne.frontend.left_behind import LeftBehind
from heterodyne.frontend.symbols import free_name
from heterodyne.frontend.trace import Captured
from heterodyne.graph import Block, Input, Loss, ModelGraph, Op, Parameter, Ref, Size, TensorSpec
from heterodyne.graph.size import ZERO
from heterodyne.loss_count import CountedBy, LossCount

__all__ = ["MODULE", "CapturedModel", "CountGiven", "Opaque", "Recount", "opaque", "read_count"]

MODULE = "module"
"""The name of the one op, and of the one block."""

CountGiven: TypeAlias = Literal["samples", "sum"] | Callable[[Mapping[str, Tensor]], float | Tensor]
"""What the loss divides by: ``samples`` (a mean over the samples, which all count alike), ``sum`` (it divides by nothing), or a function of
a batch, or part of one, that counts."""


Recount: TypeAlias = Callable[[nn.Module], tuple[Loss, LossCount]]


@dataclass(frozen=True, kw_only=True)
class Opaque:
    """What `Captured` is, for a model without a graph: it can be counted and run in one piece, not cut.

    ``recount``: finds again how the loss is averaged and counted; None: the user says so, whatever the model does. ``left``: attributes
    that forward sets, each rank to what it computes from its own samples.
    """

    graph: ModelGraph
    loss_count: LossCount = field(repr=False)
    recount: Recount | None = field(repr=False, default=None)
    left: Sequence[LeftBehind] = ()

    def again(self, model: nn.Module) -> Opaque:
        """The model as it is now, with a loss that may be averaged in another way. Raises CaptureError."""
        if self.recount is None:
            return self
        loss, count = self.recount(model)
        return replace(self, graph=replace(self.graph, loss=loss), loss_count=count)

    def block(self, block: Block) -> NoReturn:
        raise PlanError(f"there is no graph of {self.graph.name} to cut {block.name} out of: {self.graph.opaque}")


CapturedModel: TypeAlias = Captured | Opaque
"""Of any model: what it is, and what its loss counts."""


def opaque(
    model: nn.Module,
    example_batch: Batch,
    *,
    reason: str,
    loss: Loss,
    count: LossCount,
    random: bool,
    batch_norm: bool,
    name: str | None = None,
    recount: Recount | None = None,
    shared: Collection[str] = (),
    left: Sequence[LeftBehind] = (),
) -> Opaque:
    """The model as one op.

    Args:
        reason: why there is no graph, in one line.
        loss, count: how it is averaged, and what it counts.
        random: forward draws random numbers.
        shared: inputs that all samples share.
        batch_norm: forward takes statistics over the samples of a micro-batch.
        left: attributes that forward sets.
        recount: finds ``loss`` and ``count`` again; None: they hold for whatever the model does.

    Raises CaptureError for an example without a common batch dimension.
    """
    example = read_example(model, example_batch, shared)
    aliases = tied_names(model)
    parameters = tuple(_stored(n, p, aliases, trainable=p.requires_grad) for n, p in model.named_parameters())
    buffers = tuple(_stored(n, b, aliases, trainable=False) for n, b in model.named_buffers())
    scalar = TensorSpec(shape=(), dtype="float32")
    stored = {entry.name for entry in (*parameters, *buffers)}
    inputs = _inputs(example, stored)
    op_name = free_name(MODULE, stored.union(entry.symbol for entry in inputs))
    op = Op(
        name=op_name,
        target=MODULE,
        inputs=tuple(entry.symbol for entry in inputs),
        parameters=tuple(entry.name for entry in (*parameters, *buffers)),
        outputs=(scalar,),
        differentiable=(True,),
        module="",
        source=reason,
        flops_forward=ZERO,
        flops_backward=ZERO,
        bytes_read=ZERO,
        bytes_written=ZERO,
        bytes_saved=ZERO,
        samples=(None,),
    )
    graph = ModelGraph(
        name=name or type(model).__name__,
        inputs=inputs,
        parameters=parameters,
        buffers=buffers,
        ops=(op,),
        blocks=(Block(index=0, name=MODULE, kind=MODULE, start=0, stop=1),),
        loss=loss,
        batch_statistics=(op_name,) if batch_norm else (),
        random=(op_name,) if random else (),
        output=Ref(op_name),
        opaque=reason,
    )
    return Opaque(graph=graph, loss_count=count, recount=recount, left=left)


def read_count(given: CountGiven) -> CountedBy:
    """Return how the loss is averaged, by what the user says of it. Raises CaptureError for anything else."""
    if not callable(given) and given not in ("samples", "sum"):
        raise CaptureError(
            f"loss_count={given!r} is neither 'samples' (the loss is a mean over samples that all count alike), nor 'sum', nor a function "
            "of a batch that counts what the mean divides by, as lambda batch: (batch['labels'] != -100).sum()"
        )

    def count(batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> float:
        del buffers
        with torch.no_grad():
            found = float(given(batch)) if callable(given) else 0.0
        if not 0 <= found < float("inf"):
            raise CaptureError(f"loss_count counts {found} in a part of the batch: it must be a number, 0 or more")
        return found

    counts_data = callable(given)
    loss = Loss(reduction="sum" if given == "sum" else "mean", count="tokens" if counts_data else "samples")
    return CountedBy(count=count, loss=loss)


def _inputs(example: Example, stored: Collection[str]) -> tuple[Input, ...]:
    return tuple(
        Input(
            name=name,
            spec=TensorSpec(
                shape=(Size.per_sample(1), *map(Size.of, shape[1:])) if follows else tuple(map(Size.of, shape)),
                dtype=_dtype(dtype),
            ),
            batch_dim=0 if follows else None,
            symbol=free_name(name, stored),
        )
        for name, shape, dtype, follows in zip(
            example.names, example.shapes, example.dtypes, example.follows, strict=True
        )
    )


def _stored(name: str, tensor: Tensor, aliases: Mapping[str, Sequence[str]], *, trainable: bool) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor.dtype),
        trainable=trainable,
        aliases=tuple(aliases[name]),
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
