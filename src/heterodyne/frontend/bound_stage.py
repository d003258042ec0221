"""A stage with the tensors of a module, on a device: what a rank calls once a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, fx

from heterodyne.errors import DataError
from heterodyne.frontend.in_turns import InTurns
from heterodyne.frontend.members import Members
from heterodyne.frontend.regions import Keeper, Regions, compile_graph
from heterodyne.graph import Size

__all__ = ["BoundStage"]


class BoundStage:
    """Runs a stage. ``training`` turns dropout on, and lets BatchNorm take the statistics of the batch and keep them."""

    def __init__(
        self,
        *,
        run: fx.GraphModule,
        inputs: Mapping[str, tuple[Size, ...]],
        received: tuple[str, ...],
        kept: tuple[tuple[dict[str, Any], str], ...],
        results: tuple[str, ...],
        training: bool,
        members: Callable[[int, range | None], Members] | None = None,
        halves: InTurns | None = None,
    ) -> None:
        self.training = training
        self.evaluating = False
        self._keeper: Keeper | None = None
        self._members = members
        self._halves = halves
        self._run = run
        self._inputs = inputs
        self._shapes = cache(
            lambda samples: [(name, tuple(int(size(samples)) for size in shape)) for name, shape in inputs.items()]
        )
        self._received = received
        self._kept = kept
        self._results = results

    def __call__(self, inputs: Mapping[str, Tensor], received: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        """Run it forward on ``samples`` samples.

        Args:
            inputs: the model's inputs, those that the stage reads at least, on its device.
            received: what the stage receives, by name. What differentiates through it must require gradients.

        Returns what it sends, by name, and on the last stage the loss as ``loss``. Neither inputs nor what is received is changed.
        Raises DataError for an input of another shape than that of the capture.
        """
        for name, expected in self._shapes(samples):
            if inputs[name].shape != expected:
                raise DataError(
                    f"the input {name!r} is {list(inputs[name].shape)} for {samples} samples, and the stages were made for "
                    f"{list(expected)}. "
                    "Pad all batches to the shape of the example that the model was captured with"
                )
        if self._halves is not None and not self.evaluating and samples > 1:
            assert self._members is not None
            kept = [owner[name] for owner, name in self._kept]
            with Regions() as regions:
                return self._halves(inputs, received, samples, self._members, self.training, regions, *kept)
        with Regions(self._keeper) as regions:
            results = self._run(
                samples,
                self.training,
                regions,
                *([] if self._members is None else [self._members(samples, None)]),
                *[inputs[name] for name in self._inputs],
                *[received[name] for name in self._received],
                *[owner[name] for owner, name in self._kept],
            )
        return dict(zip(self._results, results, strict=True))

    def tell(self, keeper: Keeper | None) -> None:
        """Let the runs that follow tell ``keeper`` of the ops that it was bound to keep."""
        self._keeper = keeper

    def compile(self) -> bool:
        """Let torch.compile make its code, at the first call; whether that can be: not where devices exchange parts in the middle."""
        if self._members is None:
            compile_graph(self._run)
        return self._members is None
