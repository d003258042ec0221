"""What a stage is made of: pieces of the model that run one after the other on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from heterodyne.graph.size import Size
from heterodyne.model_output import loss_of

__all__ = ["LOSS", "Runnable", "Segment", "Value", "WholeModel"]

LOSS = "loss"


class Value(Protocol):
    """A tensor that one segment makes and later ones read.

    ``producer`` and ``consumers`` are numbers of segments. ``shape`` is in samples; along ``batch_dim`` lie the samples, in order,
    ``rows_a_sample`` rows each. Without ``batch_dim`` the value is the same for every sample. If it is not ``ordered``, samples cannot be
    cut out of it.
    """

    @property
    def name(self) -> str: ...
    @property
    def producer(self) -> int: ...
    @property
    def consumers(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[Size, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def batch_dim(self) -> int | None: ...
    @property
    def rows_a_sample(self) -> int: ...
    @property
    def ordered(self) -> bool: ...
    @property
    def differentiable(self) -> bool: ...


class Runnable(Protocol):
    """Computes the values that a segment sends, by name; and `LOSS`, if the model ends in it."""

    training: bool

    def __call__(
        self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A piece of a stage.

    Args:
        run: what computes it.
        receives, sends: values by which it hangs together with other segments.
        recompute: what its backward needs is not kept, but computed again.
        random_before: how many ops that draw random numbers stand before it in the model.
    """

    run: Runnable
    receives: Sequence[Value] = ()
    sends: Sequence[Value] = ()
    recompute: bool = False
    random_before: int = 0


class WholeModel:
    """The user's own module as one segment, in its own mode."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def training(self) -> bool:
        return self._module.training

    @training.setter
    def training(self, value: bool) -> None:
        del value  # its parts have modes of their own, which `evaluation` changes and gives back

    def __call__(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        del received, samples  # it needs nothing from other segments
        return {LOSS: loss_of(self._module(**inputs))}
