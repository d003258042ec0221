"""A stage with the tensors of a module, on a device: what a rank calls once a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from heterodyne.errors import DataError
from heterodyne.frontend.regions import Keeper, Regions, compile_graph
from heterodyne.frontend.sharded_graph import Members
from heterodyne.graph import Size
from heterodyne.graph.sharding.dealing import halved
from heterodyne.model_output import LOSS

__all__ = ["BoundStage", "InTurns"]


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """How all of a model runs on two halves of a micro-batch in turns.

    Args:
        run: the graph for both.
        dims: of each input, in which dim its samples lie; None: in none.
        weigh: what the loss of each part counts in that of the whole, by their inputs and sizes.
    """

    run: fx.GraphModule
    dims: Mapping[str, int | None]
    weigh: Callable[[Sequence[Mapping[str, Tensor]], Sequence[int]], list[float]]

    def divided(self, inputs: Mapping[str, Tensor], samples: int) -> tuple[tuple[range, ...], list[dict[str, Tensor]]]:
        """The samples of each half, and its inputs."""
        first = halved(samples)[0]
        parts = (range(first), range(first, samples))
        return parts, [{name: self._part(name, tensor, part) for name, tensor in inputs.items()} for part in parts]

    def _part(self, name: str, tensor: Tensor, part: range) -> Tensor:
        dim = self.dims.get(name)
        return tensor if dim is None else tensor.narrow(dim, part.start, len(part))


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
        for name, shape in self._inputs.items():
            expected = [int(size(samples)) for size in shape]
            if list(inputs[name].shape) != expected:
                raise DataError(
                    f"the input {name!r} is {list(inputs[name].shape)} for {samples} samples, and the stages were made for {expected}. "
                    "Pad all batches to the shape of the example that the model was captured with"
                )
        if self._halves is not None and not self.evaluating and samples > 1:
            return self._in_halves(self._halves, inputs, samples)
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

    def _in_halves(self, halves: InTurns, inputs: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
        assert self._members is not None
        parts, of_parts = halves.divided(inputs, samples)
        own: list[Any] = []
        for part, given in zip(parts, of_parts, strict=True):
            own += [len(part), self._members(len(part), part), *[given[name] for name in self._inputs]]
        with Regions() as regions:
            results = halves.run.forward(*own, self.training, regions, *[owner[name] for owner, name in self._kept])
        weights = halves.weigh(of_parts, [len(part) for part in parts])
        # A half in which nothing counts has no mean, and is no part of the loss.
        losses = [weight * loss for weight, (loss,) in zip(weights, results, strict=True) if weight]
        return {LOSS: sum(losses[1:], losses[0]) if losses else results[0][0]}
