"""What the model returns for the samples of a batch, under any plan.

Where every rank has the whole model, each runs the samples that it has in a step. Where the plan cuts the model, the weights are brought
together in the host memory of rank 0, which runs all samples: the stages of a pipeline make the loss and no other output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.api.loop.model_with_loss import ModelWithLoss, names_of
from heterodyne.errors import DataError
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.evaluation import eval_mode, evaluation_parts
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.stages.forward import autocast
from heterodyne.runtime.weights.materialise import called_with
from heterodyne.runtime.worker import Worker

__all__ = ["BatchPredictor", "Metric", "OutputPart", "gathered_outputs", "gathered_rows"]

Metric: TypeAlias = Callable[[Any, Any], tuple[float | Tensor, float | Tensor]]
"""``(outputs, part of the batch) -> (sum, count)`` over these samples; both are added up, and their ratio is the metric."""


@dataclass(frozen=True, kw_only=True)
class OutputPart:
    """The samples ``[first, first + count)`` of a batch, on this rank's device, and what the model returns for them.

    ``dims``: of each tensor of the outputs the dim in which the samples are, None if there is none.
    """

    first: int
    count: int
    inputs: Mapping[str, Tensor]
    outputs: Any
    dims: tuple[int | None, ...]


class BatchPredictor:
    """Runs the model in eval mode, without gradients, on the samples of this rank.

    Args:
        worker: of this rank.
        say: is informed, on rank 0, that the weights are brought together.
    """

    def __init__(self, worker: Worker, say: Callable[[str], None]) -> None:
        self._worker = worker
        self._say = say
        self._gathered: tuple[int, dict[str, Tensor]] | None = None
        self._said = False
        self._dims: dict[Any, tuple[int | None, ...]] = {}

    def forget(self) -> None:
        """The weights have changed: what was brought together of them goes."""
        self._gathered = None

    def parts(self, batch: Mapping[str, Tensor] | BatchSource) -> Iterator[OutputPart]:
        """Those of this rank, in order of the samples. Collective until the first of them, or the end, is reached.

        What only a loss outside of the model reads may be missing in the batch.
        """
        worker = self._worker
        source = batch if isinstance(batch, BatchSource) else _Some(batch, self._batch_dims)
        if not source.size:
            raise DataError("the batch to predict has no samples")
        if worker.ownership.whole:
            weights, device, spans = None, worker.device, self._own_spans(source.size)
        else:
            weights, device = self._weights(), torch.device("cpu")
            sizes = MicroBatches.of_samples(source.size, self._largest).sizes if worker.rank == 0 else ()
            spans = [(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
        for first, count in spans:
            inputs = {name: tensor.to(device) for name, tensor in source.samples(first, count).items()}
            with ExitStack() as stack:
                # A model without a graph may take a gradient in forward (torch.autograd.grad), which needs autograd.
                stack.enter_context(torch.set_grad_enabled(worker.graph.opaque is not None))
                stack.enter_context(eval_mode(worker.module))
                stack.enter_context(autocast(device, worker.precision))
                outputs = _outputs(worker.module, inputs, weights)
                dims = self._dims_of(outputs, inputs, count, weights)
            yield OutputPart(first=first, count=count, inputs=inputs, outputs=outputs, dims=dims)

    def _dims_of(
        self, outputs: Any, inputs: Mapping[str, Tensor], count: int, weights: Mapping[str, Tensor] | None
    ) -> tuple[int | None, ...]:
        """Return where the samples are in each tensor of the outputs: the dim that another number of samples changes. Tried once a form."""
        leaves, structure = pytree.tree_flatten(_without_cache(outputs))
        form = (structure, tuple(leaf.dim() if isinstance(leaf, Tensor) else None for leaf in leaves))
        if form not in self._dims:
            batch_dims = {name: self._batch_dims.get(name, 0) for name in inputs}
            number = 1 if count > 1 else 2
            other = {
                name: t if (d := batch_dims[name]) is None else _samples(t, d, number) for name, t in inputs.items()
            }
            others, _ = pytree.tree_flatten(_without_cache(_outputs(self._worker.module, other, weights)))
            self._dims[form] = tuple(
                _changed(leaf, another, count, number) for leaf, another in zip(leaves, others, strict=True)
            )
        return self._dims[form]

    @property
    def _batch_dims(self) -> dict[str, int | None]:
        return {entry.name: entry.batch_dim for entry in self._worker.graph.inputs}

    @property
    def _largest(self) -> int:
        """The size of the largest micro-batch: parts of more samples could be too much for the memory."""
        return max(max(place.micro_batches.sizes, default=1) for place in self._worker.placement.places)

    def _own_spans(self, size: int) -> Sequence[tuple[int, int]]:
        place = self._worker.placement.places[self._worker.rank]
        if place.pipeline is None or not place.answers:
            return ()
        first, sizes = evaluation_parts(self._worker.placement, size)[place.pipeline]
        return [span for span in place.spans_of(first, sizes) if span[1]]

    def _weights(self) -> dict[str, Tensor]:
        """All parameters and buffers on rank 0, on the host; kept until the next step, or another change of weights. Collective."""
        moved = self._worker.weights_moved()
        if moved or self._gathered is None or self._gathered[0] != self._worker.steps_done:
            if not self._said:
                self._say(
                    "the plan cuts the model: its weights are brought together, and rank 0 runs it on the host for outputs"
                )
                self._said = True
            tensors = self._worker.state.tensors(on=0)
            self._gathered = (self._worker.steps_done, {name: t.cpu() for name, t in tensors.items()})
        return self._gathered[1]


def _samples(tensor: Tensor, dim: int, number: int) -> Tensor:
    """The first sample, that many times."""
    return torch.cat([tensor.narrow(dim, 0, 1)] * number, dim)


def _changed(leaf: Any, another: Any, count: int, number: int) -> int | None:
    if not isinstance(leaf, Tensor) or not isinstance(another, Tensor) or leaf.dim() != another.dim():
        return None
    sizes = enumerate(zip(leaf.shape, another.shape, strict=True))
    return next((dim for dim, (size, other) in sizes if (size, other) == (count, number)), None)


def _outputs(module: nn.Module, inputs: Mapping[str, Tensor], weights: Mapping[str, Tensor] | None) -> Any:
    """Return what the user's model returns; ``weights``: all parameters and buffers of ``module``, where those here are not whole."""
    model: nn.Module = module
    args: tuple[Tensor, ...] = ()
    kwargs = dict(inputs)
    if isinstance(module, ModelWithLoss):
        model, (args, kwargs) = module.model, module.arguments(inputs)
    if weights is None:
        outputs = model(*args, **kwargs)
    else:
        outputs = called_with(model, names_of(module).own_model(weights), args, kwargs)
    return pytree.tree_map_only(Tensor, Tensor.detach, outputs) if torch.is_grad_enabled() else outputs


class _Some:
    """A batch in which some inputs may be missing."""

    def __init__(self, tensors: Mapping[str, Tensor], batch_dims: Mapping[str, int | None]) -> None:
        self._tensors = tensors
        self._dims = {name: batch_dims.get(name, 0) for name in tensors}
        sizes = {name: tensors[name].shape[dim] for name, dim in self._dims.items() if dim is not None}
        if len(set(sizes.values())) != 1:
            raise DataError(f"the inputs of the batch do not agree on its size: {sizes}")
        self.size = next(iter(sizes.values()))

    def samples(self, first: int, count: int) -> dict[str, Tensor]:
        return {
            name: tensor if (dim := self._dims[name]) is None else tensor.narrow(dim, first, count)
            for name, tensor in self._tensors.items()
        }


def gathered_outputs(parts: Sequence[OutputPart], communicator: Communicator, on: Literal["all", "rank0"]) -> Any:
    """The outputs of all parts of all ranks as one, tensors on the host, the samples in order in the dim where the model has them.

    What has no row for each sample, a loss or a cache, is None. Collective. None on the ranks that are not to have it.

    Raises DataError if nothing in the outputs has a row for each sample.
    """
    own = _Own(parts)
    described = communicator.all_gather_object(own.described)
    told = [entry for entry in described if entry.spans]
    followed = [all(entry.rows[leaf] is not None for entry in told) for leaf in range(len(told[0].rows))]
    if not any(followed):
        raise DataError(
            f"the model returns {told[0].kind}, in which nothing has a row for each sample: let forward return its outputs, as a tensor, "
            "a tuple, a mapping or an object that holds them beside the loss"
        )
    wanted = on == "all" or communicator.rank == 0
    spans = [entry.spans for entry in described]
    leaves: list[Tensor | None] = []
    for leaf, follows in enumerate(followed):
        row = told[0].rows[leaf]
        part = own.leaves[leaf] if own.leaves else None
        leaves.append(gathered_rows(part, spans, row, communicator, on) if follows and row is not None else None)
    if not wanted:
        return None
    return pytree.tree_unflatten(leaves, pytree.tree_structure(told[0].skeleton, is_leaf=_is_hole))


Row: TypeAlias = tuple[int, tuple[int, ...], torch.dtype]
"""Of a tensor the dim of the samples, the shape of one sample of it, and the type."""


@dataclass(frozen=True)
class _Hole:
    """Where a tensor of the outputs was."""


def _is_hole(value: object) -> bool:
    return isinstance(value, _Hole)


@dataclass(frozen=True, kw_only=True)
class _Described:
    """What a rank has: its spans, and of each tensor the dim of the samples, the shape of one and the type, None for what has none."""

    spans: tuple[tuple[int, int], ...] = ()
    rows: tuple[Row | None, ...] = ()
    skeleton: Any = None
    kind: str = ""


class _Own:
    """The leaves of the outputs of this rank's parts, joined."""

    def __init__(self, parts: Sequence[OutputPart]) -> None:
        self.described = _Described()
        self.leaves: list[Tensor | None] = []
        if not parts:
            return
        flat = [pytree.tree_flatten(_without_cache(part.outputs)) for part in parts]
        structure = flat[0][1]
        dims: list[int | None] = []
        for number in range(structure.num_leaves):
            values = [leaves[number] for leaves, _ in flat]
            dim = parts[0].dims[number]
            dims.append(dim)
            follow = dim is not None and all(part.dims[number] == dim for part in parts)
            self.leaves.append(
                torch.cat([v.detach().cpu().movedim(dim, 0) for v in values]).contiguous() if follow else None
            )
        self.described = _Described(
            spans=tuple((part.first, part.count) for part in parts),
            rows=tuple(
                None if leaf is None or dim is None else (dim, tuple(leaf.shape[1:]), leaf.dtype)
                for dim, leaf in zip(dims, self.leaves, strict=True)
            ),
            skeleton=pytree.tree_unflatten([_Hole()] * structure.num_leaves, structure),
            kind=f"a {type(parts[0].outputs).__name__}",
        )


def gathered_rows(
    part: Tensor | None,
    spans: Sequence[Sequence[tuple[int, int]]],
    row: Row,
    communicator: Communicator,
    on: Literal["all", "rank0"],
) -> Tensor | None:
    """Return a tensor of all samples, from all ranks, on the ranks that are to have it. Collective.

    Args:
        part: of this rank's samples, on the host, these in dim 0; None without any.
        spans: of each rank's part the ``(first sample, count)``; all together cover each sample once.
    """
    whole: Tensor | None = None
    dim, shape, dtype = row
    size = sum(count for own in spans for _, count in own)
    for rank, own in enumerate(spans):
        if not own:
            continue
        here = rank == communicator.rank
        rows = part if here else torch.empty(sum(count for _, count in own), *shape, dtype=dtype)
        assert rows is not None
        if on == "all":
            communicator.control.broadcast(rows, rank)
        elif here and rank != 0:
            communicator.send(rows, 0)
        elif communicator.rank == 0 and rank != 0:
            communicator.receive(rows, rank)
        if on == "rank0" and communicator.rank != 0:
            continue
        whole = torch.empty(size, *shape, dtype=dtype) if whole is None else whole
        for (first, count), values in zip(own, torch.split(rows, [count for _, count in own]), strict=True):
            whole[first : first + count] = values
    return whole if whole is None else whole.movedim(0, dim)


def _without_cache(outputs: Any) -> Any:
    """Without the keys and values that a Transformers model returns for generation: they are larger than all else."""
    if isinstance(outputs, Mapping) and "past_key_values" in outputs:
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "past_key_values"})
    return outputs
