"""How a sharded stage runs on two halves of a micro-batch in turns: what each half gets, and how the results
become those of the whole.

At the borders of a stage the devices share the samples of a micro-batch, and those of a half otherwise than those of the whole. So what is
received is made whole on each device and cut again for the halves, and what is sent likewise the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from heterodyne.frontend.members import Members
from heterodyne.graph.sharding.dealing import halved
from heterodyne.model_output import LOSS

__all__ = ["Border", "InTurns"]


@dataclass(frozen=True, kw_only=True)
class Border:
    """A tensor that crosses the border of a stage.

    Args:
        dim: in which its samples are, ``rows`` of it for each; None: it is the same for all samples.
        joined, dealt: the steps of `Members` from slices of the samples to all of them, and back.
    """

    name: str
    dim: int | None
    rows: int = 1
    joined: tuple[int, ...] = ()
    dealt: tuple[int, ...] = ()

    def divided(
        self, tensor: Tensor, whole: Members, halves: Sequence[Members], parts: Sequence[range]
    ) -> list[Tensor]:
        """Return what is received, for each half."""
        if self.dim is None:
            return [tensor for _ in parts]
        for step in self.joined:
            tensor = whole.convert(tensor, step)
        found = []
        for part, half in zip(parts, halves, strict=True):
            own = tensor.narrow(self.dim, self.rows * part.start, self.rows * len(part))
            for step in self.dealt:
                own = half.convert(own, step)
            found.append(own)
        return found

    def united(self, of_halves: Sequence[Tensor], whole: Members, halves: Sequence[Members]) -> Tensor:
        """Return what is sent, of both halves."""
        if self.dim is None:
            return of_halves[0]
        found = []
        for tensor, half in zip(of_halves, halves, strict=True):
            own = tensor
            for step in self.joined:
                own = half.convert(own, step)
            found.append(own)
        united = torch.cat(found, self.dim)
        for step in self.dealt:
            united = whole.convert(united, step)
        return united


@dataclass(frozen=True, kw_only=True)
class InTurns:
    """Args:
    run: the graph for both halves.
    reads: the model's inputs that the graph is given, in its order.
    dims: of each input, in which dim its samples are; None: in none.
    receives, sends: what crosses, in the order of the graph.
    weigh: what the loss of each half counts in that of the whole, by their inputs and sizes; None: the stage makes no loss.
    """

    run: fx.GraphModule
    reads: Sequence[str]
    dims: Mapping[str, int | None]
    receives: Sequence[Border] = ()
    sends: Sequence[Border] = ()
    weigh: Callable[[Sequence[Mapping[str, Tensor]], Sequence[int]], list[float]] | None

    def __call__(
        self,
        inputs: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        samples: int,
        members: Callable[[int, range | None], Members],
        *shared: object,
    ) -> dict[str, Tensor]:
        """The results for two samples or more. ``shared``: what both halves are given alike."""
        first = halved(samples)[0]
        parts = (range(first), range(first, samples))
        of_parts = [{name: self._part(name, tensor, part) for name, tensor in inputs.items()} for part in parts]
        whole, halves = members(samples, None), [members(len(part), part) for part in parts]
        arrived = [border.divided(received[border.name], whole, halves, parts) for border in self.receives]
        own: list[object] = []
        for number, (part, half) in enumerate(zip(parts, halves, strict=True)):
            own += [len(part), half, *(of_parts[number][name] for name in self.reads), *(of[number] for of in arrived)]
        results = self.run.forward(*own, *shared)
        made = {
            border.name: border.united([of_half[place] for of_half in results], whole, halves)
            for place, border in enumerate(self.sends)
        }
        if self.weigh is not None:
            weights = self.weigh(of_parts, [len(part) for part in parts])
            # A half in which nothing counts has no mean, and is no part of the loss.
            losses = [weight * of[-1] for weight, of in zip(weights, results, strict=True) if weight]
            made[LOSS] = sum(losses[1:], losses[0]) if losses else results[0][-1]
        return made

    def _part(self, name: str, tensor: Tensor, part: range) -> Tensor:
        dim = self.dims.get(name)
        return tensor if dim is None else tensor.narrow(dim, part.start, len(part))
