"""The cost of a layer on a device kind: the one table that the fleet search reads, whoever filled it.

A model is a sequence of layers, most of them alike: an embedding, blocks, a head. Alike layers have one name, so a table has one row per
kind of layer, however deep the model is. Measured profiles and formulas fill the same table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol, get_args

from heterodyne.plan.short import width_words

__all__ = ["DATA_WIDTHS", "WAYS", "LayerCost", "LayerCosts", "Way", "Widths", "compute_s", "least_bytes"]

DATA_WIDTHS = (1, 2, 4, 8)
"""In how many parts a stage may have its micro-batches wherever it is known what a layer costs one device."""
Way = Literal["split", "context"]
"""In which the devices of a stage divide layers: their weights, or sequences."""
WAYS: tuple[Way, ...] = get_args(Way)


class Widths(NamedTuple):
    """Parallel widths of a stage. Experts are sharded over all its devices, as far as there are experts.

    Args:
        tensor: tensor parallelism (Shoeybi et al., 2019); context: of the sequence; data: of the micro-batch.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def copies(self) -> int:
        """Copies of every parameter that is no expert's, in one stage."""
        return self.context * self.data

    @classmethod
    def along(cls, way: Way, devices: int) -> Widths:
        """Of so many devices in one way."""
        return cls(tensor=devices) if way == "split" else cls(context=devices)

    @property
    def way(self) -> Way:
        """In which they divide layers, where there is one."""
        return "split" if self.tensor > 1 else "context"

    @property
    def in_words(self) -> str:
        """``tensor 4 x data 2``; "" for one device."""
        return width_words(zip(self._fields, self, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """One layer on one device of a stage, whose devices share the work by some `Widths`, for one micro-batch of a size.

    Seconds hold what the devices of the stage exchange inside the layer.

    Args:
        forward_s, backward_s: of one micro-batch; the backward whole, without a recomputed forward.
        forward_again_s: of the forward, where the backward computes it again; None: ``forward_s``.
        update_s: of the optimizer, for all the parameters of the layer that lie on this device; once a step.
        parameter_bytes, gradient_bytes, optimizer_bytes: on this device, whatever the micro-batch.
        kept_bytes: of one micro-batch, from its forward until its backward.
        kept_bytes_recomputed: the same if the layer is recomputed: what its forward reads.
        workspace_bytes: comes and goes inside a pass.
        output_bytes: of the whole micro-batch, what the next stage reads; as much comes back as its gradient.
        expert_bytes: of ``gradient_bytes``, what belongs to experts; ``expert_copies``: devices of the stage that hold the same ones. Of
            everything else there are `Widths.copies`.
        tied_bytes: of ``gradient_bytes``, those of parameters that other layers read as well, as a head does that shares the weights
            of the embedding.
    """

    forward_s: float
    backward_s: float
    update_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    kept_bytes_recomputed: int
    output_bytes: int
    workspace_bytes: int = 0
    expert_bytes: int = 0
    expert_copies: int = 1
    tied_bytes: int = 0
    forward_again_s: float | None = None

    @property
    def recompute_s(self) -> float:
        """Seconds that recompute adds to a backward: none for a layer that would hold no less."""
        if self.kept_bytes_recomputed >= self.kept_bytes:
            return 0.0
        return self.forward_s if self.forward_again_s is None else self.forward_again_s

    @property
    def state_bytes(self) -> int:
        """Gradients and what the optimizer keeps."""
        return self.gradient_bytes + self.optimizer_bytes

    def beside(self, data: int) -> LayerCost:
        """The same where ``data`` devices each have such a micro-batch: their output is that of all of them."""
        return self if data == 1 else replace(self, output_bytes=data * self.output_bytes)


class LayerCosts(Protocol):
    """The costs of one model on kinds of devices."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The kind of each layer, from the input to the loss: ``("embedding", "block", "block", "head")``."""

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """Those that are known, ascending; none for a kind of device that is not."""

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None where it is not known, such as beyond the largest micro-batch that was measured, or where samples would be divided."""


def compute_s(costs: LayerCosts, device_kind: str, micro_batch: int = 1) -> float:
    """Return the seconds of the forward and backward of a micro-batch through all layers on one device, as far as they are known."""
    known = _on_one_device(costs, device_kind, micro_batch)
    return sum(count * (layer.forward_s + layer.backward_s) for layer, count in known)


def least_bytes(costs: LayerCosts, device_kind: str) -> int:
    """Return the bytes of one copy of all weights and as many for their gradients, as far as they are known; tied ones count once."""
    return 2 * round(
        sum(
            count * layer.parameter_bytes * (1 - layer.tied_bytes / layer.gradient_bytes if layer.gradient_bytes else 1)
            for layer, count in _on_one_device(costs, device_kind, 1)
        )
    )


def _on_one_device(costs: LayerCosts, device_kind: str, micro_batch: int) -> Iterator[tuple[LayerCost, int]]:
    for name, count in Counter(costs.layers).items():
        layer = costs.cost(device_kind, name, Widths(), micro_batch)
        if layer is not None:
            yield layer, count
