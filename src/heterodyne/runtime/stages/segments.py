"""The segments of a stage: pieces of the model that run one after the other on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from heterodyne.graph.cut import Value
from heterodyne.model_output import LOSS, loss_of
from heterodyne.runtime.stages.kept_outputs import KeptOutputs

__all__ = ["Compilable", "Runnable", "Segment", "WholeModel"]


class Runnable(Protocol):
    """Computes the values that a segment sends, by name; and `LOSS`, if the model ends in it."""

    training: bool
    evaluating: bool

    def __call__(
        self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int
    ) -> dict[str, Tensor]: ...


class Compilable(Runnable, Protocol):
    """A piece of the captured model."""

    def tell(self, keeper: KeptOutputs | None) -> None:
        """Of the ops that it was bound to keep, in the runs that follow."""

    def compile(self) -> object:
        """Let torch.compile make its code, at the first call."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A piece of a stage.

    Args:
        run: what computes it.
        receives, sends: values that connect it with other segments.
        recompute: its saved tensors are recomputed; ``keeps``: except for the outputs of some of its ops.
        hosted: its saved tensors are offloaded to the host.
        random_before: the number of ops before it in the model that draw random numbers.
    """

    run: Runnable
    receives: Sequence[Value] = ()
    sends: Sequence[Value] = ()
    recompute: bool = False
    hosted: bool = False
    keeps: Compilable | None = None
    random_before: int = 0


class WholeModel:
    """The user's own module as one segment, in its own mode. ``run``: what is called in its place (a compiled one); None: itself."""

    def __init__(self, module: nn.Module, run: Callable[..., object] | None = None) -> None:
        self.evaluating = False
        self._module = module
        self._run = module if run is None else run

    @property
    def training(self) -> bool:
        return self._module.training

    @training.setter
    def training(self, value: bool) -> None:
        del value  # its parts have modes of their own, which `evaluation` changes and gives back

    def __call__(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        del received, samples  # it needs nothing from other segments
        return {LOSS: loss_of(self._run(**inputs))}
