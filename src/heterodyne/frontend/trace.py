"""Capture, as a recipe: trace, watch what the ops keep, tell how the loss is averaged, find the blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, fx, nn

from heterodyne.arguments import checked_arguments
from heterodyne.around_model import unchanged_around
from heterodyne.errors import CaptureError
from heterodyne.frontend.aliases import shared_memory
from heterodyne.frontend.batch_statistics import batch_statistics, refuse_own_exchange
from heterodyne.frontend.block_program import BlockProgram, extract
from heterodyne.frontend.blocks import find_blocks
from heterodyne.frontend.bound_coupled_loss import BoundCoupledLoss, FeatureExchange
from heterodyne.frontend.closures import refuse_closures, refuse_computed
from heterodyne.frontend.code import code_digest
from heterodyne.frontend.counting import LossCounter
from heterodyne.frontend.coupled_loss import CoupledLoss, coupled_loss, divide_labelled_means
from heterodyne.frontend.coupling import CoupledError
from heterodyne.frontend.describe import describe, random_ops, ref_of
from heterodyne.frontend.embedding_gradients import refuse_embedding_gradients
from heterodyne.frontend.example import Batch, Example, read_example
from heterodyne.frontend.experts import put_together
from heterodyne.frontend.export import Traced, export
from heterodyne.frontend.left_behind import LeftBehind
from heterodyne.frontend.loss import read_loss
from heterodyne.frontend.numbers import Numbers
from heterodyne.frontend.own_memory import require_own_memory
from heterodyne.frontend.replay import Observed, observe
from heterodyne.frontend.sample_order import samples_in
from heterodyne.frontend.sizes import spec_of
from heterodyne.frontend.skeleton import require_initialised
from heterodyne.frontend.split_loss import split_loss
from heterodyne.frontend.stage_program import StageProgram, stage_program
from heterodyne.frontend.stage_values import CuttableGraph
from heterodyne.frontend.symbols import name_ops
from heterodyne.graph import Block, Input, Loss, ModelGraph, Parameter, require_pieces
from heterodyne.graph.draws import require_samples_own_draws
from heterodyne.graph.sharding import Sharding
from heterodyne.loss_count import LossCount, TogetherCount

__all__ = ["Captured", "capture", "trace"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A model's graph, with what it takes to run parts of it.

    ``code``: a digest of the code behind the graph (`code_digest`), which distinguishes models whose ops are the same.
    """

    graph: ModelGraph
    code: str
    _traced: Traced = field(repr=False)
    _observed: dict[fx.Node, Observed] = field(repr=False)
    _counter: LossCount = field(repr=False)
    _coupled: CoupledLoss | None = field(repr=False)
    _buffers: Mapping[str, Tensor] = field(repr=False)
    _example: Example = field(repr=False)

    @property
    def loss_count(self) -> LossCount:
        """Return how the losses of the parts of a batch make up the loss of the batch."""
        return self._counter

    def block(self, block: Block) -> BlockProgram:
        """The ops of a block as something that runs by itself, with random weights and inputs."""
        return extract(self._traced, self._observed, block, self._buffers)

    def stage(self, start: int, stop: int, *, starts: Sequence[int], sharding: Sharding | None = None) -> StageProgram:
        """The ops ``[start, stop)`` as something that runs on real tensors with the model's own parameters.

        ``starts``: the first ops of all stages of the pipeline, which say what crosses; ``sharding``: how this one is laid out on its
        devices, None: whole on each. The model must have been captured in training
        mode for the stage to train. Raises PlanError for a cut that would change the result, with the op and its line.
        """
        require_pieces(self.graph)
        return stage_program(self._pieces, start, stop, starts, sharding, self._counter, self._coupled)

    def coupled(self, module: nn.Module, device: torch.device, exchange: FeatureExchange) -> BoundCoupledLoss:
        """The model on a replica's samples, with a loss in which the samples of all replicas see each other (``loss.reduction``
        ``coupled``)."""
        assert self._coupled is not None
        return self._coupled.bind(self._pieces, module, device, exchange)

    def loss_together(self, module: nn.Module, device: torch.device, exchange: FeatureExchange) -> BoundCoupledLoss:
        """The end of such a loss alone, of what the last stage has made of all micro-batches."""
        assert self._coupled is not None
        return self._coupled.bind(self._pieces, module, device, exchange, whole=False)

    def refuse_reads_around(self, model: nn.Module) -> None:
        """Raise CaptureError if the graph has parameters of ``model`` as constants, of which this was captured from a copy."""
        refuse_closures(self._traced, model)

    @property
    def numbers(self) -> Numbers:
        """Attributes of the model that are inputs of the graph."""
        return self._traced.numbers

    def again(self, model: nn.Module, *, batch: Batch | None = None, numbers: Sequence[str] = ()) -> Captured:
        """Capture the model as it is now, which may be another than then.

        Args:
            batch: of inputs of other shapes than the example's; None: of the same.
            numbers: names of attributes that are to be inputs of the graph, if it can have them so.

        Raises CaptureError.
        """
        example = self._example if batch is None else read_example(model, batch, self._example.shared)
        if numbers:
            try:
                return trace(model, example, name=self.graph.name, numbers=numbers)
            except CaptureError:
                pass  # without them it tells what is wrong, if that is not the numbers
        return trace(model, example, name=self.graph.name)

    @property
    def left(self) -> Sequence[LeftBehind]:
        """Return what forward sets in the model and around it, and the graph does not."""
        return self._traced.left

    @cached_property
    def _pieces(self) -> CuttableGraph:
        return CuttableGraph(traced=self._traced, observed=self._observed, graph=self.graph)


_SEARCH_S = 20.0


@checked_arguments
def capture(model: nn.Module, example_batch: Batch, *, shared: Collection[str] = ()) -> ModelGraph:
    """Return what a model is. See `trace`."""
    return trace(model, example_batch, shared=shared).graph


def trace(
    model: nn.Module,
    example_batch: Batch | Example,
    *,
    name: str | None = None,
    shared: Collection[str] = (),
    numbers: Sequence[str] = (),
) -> Captured:
    """Capture a model with its loss. The model is left as it was, and nothing is computed.

    Args:
        model: any module that returns its loss (see `loss_of`), on any device, the meta device included.
        example_batch: the tensors that it is called with, by keyword or in order; their values do not matter. Or what was read of one.
        name: what to call it; None: its class.
        shared: inputs that all samples share. Those whose dim 0 is not of the batch size are known to be such.
        numbers: names of attributes that are to be inputs of the graph, since they change during the run.

    Raises CaptureError, with the line of the model and what to change.
    """
    require_initialised(model)
    require_own_memory(model)
    refuse_own_exchange(model)
    known = isinstance(example_batch, Example)
    example = example_batch if isinstance(example_batch, Example) else read_example(model, example_batch, shared)
    try:
        return _trace(model, example, name, numbers)
    except CaptureError as error:
        if not known and (found := _rather_shared(model, example)):
            raise CaptureError(
                f"{error}\n{found!r} is taken to have a row for each sample, since its first dim is as long as the batch. If all samples "
                f"share it, pass shared=({found!r},): then the model can be captured."
            ) from error
        raise


def _rather_shared(model: nn.Module, example: Example) -> str:
    """Return the input without which the capture of a model does not fail, if that does not follow the batch; "" if there is none."""
    started_s = time.perf_counter()
    for other in example.sharing():
        if time.perf_counter() - started_s > _SEARCH_S:
            break
        try:
            _trace(model, other, None)
        except CaptureError:
            continue
        return next(name for name in other.shared if name not in example.shared)
    return ""


def _trace(model: nn.Module, example: Example, name: str | None, numbers: Sequence[str] = ()) -> Captured:
    with unchanged_around(model):
        exported = export(model, example, numbers=numbers)
    refuse_closures(exported, model)
    refuse_computed(exported)
    refuse_embedding_gradients(exported)
    traced = put_together(exported)
    traced, loss, counter, coupled = _read_loss(
        traced,
        example,
        dict(model.named_buffers()),
        lambda batch: trace(model, batch, name=name, shared=example.shared).loss_count,
    )
    if loss.reduction in ("terms", "coupled") and traced.module_only:
        why = "has terms with denominators of their own" if loss.reduction == "terms" else "compares samples"
        raise CaptureError(
            f"the loss {why}, and {'; '.join(map(str, traced.module_only))}: the first needs the graph of the model to run, the second the "
            "module. Write the backward as ops that PyTorch differentiates, or divide all terms of the loss by one count."
        )
    name_ops(traced.ops, {role.symbol for role in traced.roles.values()})
    observed = observe(traced)
    buffers = dict(model.named_buffers())
    graph = ModelGraph(
        name=name or type(model).__name__,
        inputs=_inputs(traced, example),
        parameters=tuple(
            _parameter(n, p, traced, trainable=p.requires_grad) for n, p in traced.model.named_parameters()
        ),
        buffers=tuple(_parameter(n, b, traced, trainable=False) for n, b in traced.model.named_buffers()),
        ops=describe(traced, observed, _written_memory(traced, observed), _sample_dims(traced)),
        blocks=find_blocks(traced, observed),
        loss=loss,
        batch_statistics=batch_statistics(traced),
        random=random_ops(traced),
        task_graphs=traced.annotations.task_graphs,
        constants=(
            *(_constant(name, value) for name, value in traced.constants.items()),
            *(_constant(r.name, n.meta["val"]) for n, r in traced.roles.items() if r.kind == "number"),
        ),
        output=ref_of(traced.loss),
        module_only=traced.module_only,
        together_from=None if coupled is None else coupled.first_op(traced),
    )
    require_samples_own_draws(graph)
    return Captured(
        graph=graph,
        code=code_digest(traced.graph, model),
        _traced=traced,
        _observed=observed,
        _counter=counter,
        _coupled=coupled,
        _buffers=buffers,
        _example=example,
    )


def _read_loss(
    traced: Traced, example: Example, buffers: Mapping[str, Tensor], again: Callable[[Batch], LossCount]
) -> tuple[Traced, Loss, LossCount, CoupledLoss | None]:
    """Return how the loss is averaged, with the graph as it has to be for that. Raises CaptureError."""
    try:
        reading = read_loss(traced)
    except CoupledError as error:
        traced = divide_labelled_means(traced)
        return traced, Loss(reduction="coupled"), TogetherCount(), coupled_loss(traced, error)
    counter = LossCounter(traced, example, reading, buffers, again)
    return (split_loss(traced, reading) if reading.split else traced), reading.loss, counter, None


def _inputs(traced: Traced, example: Example) -> tuple[Input, ...]:
    nodes = {role.name: (node, role) for node, role in traced.roles.items() if role.kind == "input"}
    return tuple(
        Input(name=name, spec=spec_of(node.meta["val"]), batch_dim=0 if follows else None, symbol=role.symbol)
        for name, follows in zip(example.names, example.follows, strict=True)
        for node, role in (nodes[name],)
    )


def _sample_dims(traced: Traced) -> dict[fx.Node, int | None]:
    return {node: samples.dim for node, samples in samples_in(traced.graph).items() if samples.ordered}


def _written_memory(traced: Traced, observed: dict[fx.Node, Observed]) -> dict[fx.Node, str]:
    """For each node that is in memory which is written into, what that memory is called."""
    memory = shared_memory(traced.graph, observed)
    named = {memory.group_of[n]: role.symbol for n, role in traced.roles.items()}
    return {node: named.get(group, group.name) for node, group in memory.group_of.items() if memory.writers.get(group)}


def _constant(name: str, tensor: Tensor) -> Parameter:
    return Parameter(
        name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), trainable=False
    )


def _parameter(name: str, tensor: Tensor, traced: Traced, *, trainable: bool) -> Parameter:
    return Parameter(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=trainable,
        aliases=traced.aliases[name],
    )
