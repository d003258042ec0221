"""An exponential moving average of the weights, kept beside them in the parts in which each rank updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.held_state import held_pieces
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.pieces import part_of
from heterodyne.runtime.weights.whole_state import gathered_optimizer, put_own_part

__all__ = ["WeightAverage"]

_AVERAGE = "average"


class WeightAverage:
    """The average of what one rank holds of all parameters, trained or not: it begins as they are, and takes part in them by `update`.

    Of a trained parameter it lies as what the optimizer updates (`MasterWeights.updated`), in fp32 where that is a master; of a frozen one
    as this rank has it. So no rank asks another before the average is read.

    Args:
        masters, ownership, shards: see `ModelState`.
        decay: the part of the average that an update keeps, from 0 to 1.
    """

    def __init__(
        self,
        module: nn.Module,
        masters: MasterWeights,
        ownership: Ownership,
        communicator: Communicator,
        shards: Mapping[str, Tensor],
        decay: float,
    ) -> None:
        self.decay = decay
        self._module = module
        self._masters = masters
        self._ownership = ownership
        self._communicator = communicator
        self._shards = shards
        self._own = {name: part.detach().clone() for name, part in self._parts().items()}

    def _parts(self) -> Mapping[str, Tensor]:
        rank, masters = self._communicator.rank, self._masters
        held = {name: p for name, p in self._module.named_parameters() if self._ownership.holds(rank, name)}
        return {name: p for name, p in held.items() if name not in masters.names} | dict(masters.updated)

    def update(self) -> None:
        """Set the average to ``decay`` times itself and ``1 - decay`` times the weights."""
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, part in self._parts().items():
            own = self._own[name]
            averages, weights = alike.setdefault((own.device, own.dtype), ([], []))
            averages.append(own)
            weights.append(part.detach())
        average = get_ema_multi_avg_fn(self.decay)  # type: ignore[no-untyped-call]
        for averages, weights in alike.values():
            average(averages, weights, None)

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, whole, on every rank. Collective."""
        names = [name for name, _ in self._module.named_parameters()]
        return {"decay": self.decay, "weights": self._gathered(names)}

    def held(self) -> dict[str, Any]:
        """Return the part of `state` that this rank answers for, what is cut in `Pieces`."""
        own = {name: {_AVERAGE: part} for name, part in self._own.items()}
        found = held_pieces(own, self._ownership, self._communicator.rank)
        return {"decay": self.decay, "weights": {name: values[_AVERAGE] for name, values in found.items()}}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `state`, also of another plan. Raises CheckpointError if something is missing."""
        for name, own in self._own.items():
            value = state.get("weights", {}).get(name)
            if value is None or tuple(value.shape) != tuple(self._ownership.shapes[name]):
                raise CheckpointError(
                    f"the checkpoint has no average of {name!r} of that shape: it is of another model"
                )
            part = part_of(value, self._ownership.box(self._communicator.rank, name))
            own.copy_(self._masters.own_range(name, part) if name in self._masters.names else part)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the average in place of its weights while the block runs, in which they are lent (`MasterWeights.lent`).

        Collective as it begins.
        """
        rank = self._communicator.rank
        held = {n: p.detach() for n, p in self._module.named_parameters() if self._ownership.holds(rank, n)} | dict(
            self._shards
        )
        before = {name: tensor.clone() for name, tensor in held.items()}
        for name, parameter in self._module.named_parameters():
            if name in self._ownership.shards and name not in self._shards and not self._ownership.apart:
                whole = self._gathered([name])[name]
                if name in held:
                    put_own_part(name, parameter.detach(), whole, self._ownership, rank)
            elif name in self._own:
                held[name].copy_(self._own[name].view(held[name].shape))
        try:
            yield
        finally:
            for name, tensor in held.items():
                tensor.copy_(before[name])
            self._masters.refresh()  # a rank that does not train may have been given the average

    def _gathered(self, names: list[str]) -> dict[str, Tensor]:
        """Return the averages of these parameters, whole. Collective."""
        own = {name: {_AVERAGE: self._own[name]} for name in names if name in self._own}
        found = gathered_optimizer(own, self._ownership, self._communicator, names)
        return {name: values[_AVERAGE] for name, values in found.items()}
