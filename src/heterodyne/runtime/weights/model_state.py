"""What a rank keeps from step to step, weights and optimizer state: brought together, in parts, and taken back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heterodyne.errors import CheckpointError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.held_state import held_state
from heterodyne.runtime.weights.masters import MasterWeights
from heterodyne.runtime.weights.materialise import stored_tensors
from heterodyne.runtime.weights.optimizer import load_state_by_name, require_kept_by_name, state_by_name
from heterodyne.runtime.weights.ownership import Ownership
from heterodyne.runtime.weights.parameter_groups import load_options, options_by_name
from heterodyne.runtime.weights.pieces import as_tensor, part_of
from heterodyne.runtime.weights.whole_state import (
    gathered_model,
    gathered_optimizer,
    gathered_tensors,
    held_entries,
    own_boxes,
    put_own_part,
    restored_model,
    share_whole_state,
)

__all__ = ["ModelState"]

_OPTIONS, _UPDATED = "optimizer_options", "updated"


class ModelState:
    """The state of one rank: ``model`` as a state dict, ``optimizer`` by parameter name.

    Args:
        module: whose weights are in place on this rank.
        optimizer: of ``masters.updated``.
        masters: of the trained parameters that this rank holds.
        trained: the names of all that are trained.
        ownership: who holds what.
        shards: what is held of parameters that are sharded, row after row.
        drifts: whole models may differ between the ranks that train them: on unlike devices equal gradients, rounded differently in the
            update, drift apart in the last bits. Those of the keeper count.
        keeps_options: the state has the options of the optimizer's groups, such as rates and what a step counts there.
        leader: the rank whose whole model those ``followers`` are given that do not train it, idle or without samples.

    To ask for the state changes nothing that is trained on: where values differ, ranks that train are given copies of the keeper's.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        masters: MasterWeights,
        *,
        trained: Sequence[str],
        ownership: Ownership,
        communicator: Communicator,
        shards: Mapping[str, Tensor],
        drifts: bool,
        leader: int,
        followers: Sequence[int],
        keeps_options: bool = False,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._masters = masters
        self._updated = masters.updated
        self._trained = list(trained)
        self._ownership = ownership
        self._communicator = communicator
        self._shards = shards
        self._drifts = drifts
        self._leader = leader
        self._keeps_options = keeps_options
        self._followers = tuple(followers)
        self._held = held_entries(module)

    def whole(self) -> dict[str, Any]:
        """All of it, on every rank. Collective. What is held here is not copied, unless another rank's values count."""
        self._lead()
        if self._alike:
            return {"model": self._module.state_dict(), "optimizer": self._of_optimizer(), **self._options()}
        return {
            **self._options(everywhere=True),
            "model": gathered_model(self._module, self._ownership, self._communicator, self._shards),
            "optimizer": gathered_optimizer(self._of_optimizer(), self._ownership, self._communicator, self._trained),
        }

    def own(self) -> dict[str, Any]:
        """The part that this rank writes into a checkpoint; all parts together are the whole. Collective, and nothing is copied.

        Where every rank has the whole model, and the same one, each gives all of it, so that the writing can be shared out.
        """
        return self.whole() if self._alike else self.held({})

    def held(self, before: Mapping[str, Tensor]) -> dict[str, Any]:
        """The part that this rank answers for and has, what is cut in `Pieces`; nothing is asked of others, and nothing is copied.
        ``before``: buffers as they were.
        """
        held = held_state(
            self._module,
            self._of_optimizer(),
            self._ownership,
            self._communicator.rank,
            shards=self._shards,
            before=before,
        )
        return {**held, **self._options()}

    def weights(self, on: int | None = 0) -> dict[str, Any]:
        """Return the whole model's state dict on one rank, nothing on the others; None: on all. Collective."""
        self._lead()
        if self._alike:
            return self._module.state_dict() if on in (None, self._communicator.rank) else {}
        return gathered_model(self._module, self._ownership, self._communicator, self._shards, on=on)

    def tensors(self, on: int | None, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return every parameter and buffer (or those ``names``) by name, on one rank or (None) on all. Collective. See `whole`."""
        self._lead()
        if self._alike:
            here = on is None or on == self._communicator.rank
            stored = stored_tensors(self._module) if here else ()
            return {name: tensor.detach() for name, tensor in stored if names is None or name in names}
        return gathered_tensors(self._module, self._ownership, self._communicator, self._shards, on=on, names=names)

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers to other values, whole and the same on every rank; the optimizer's state stays as it is."""
        rank = self._communicator.rank
        for name, tensor in stored_tensors(self._module):
            if name in values and self._ownership.holds(rank, name):
                put_own_part(name, tensor, values[name], self._ownership, rank, self._shards)
        self._masters.take(
            {
                name: part_of(values[name], self._ownership.box(rank, name))
                for name in self._masters.names
                if name in values
            }
        )

    def updated(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return what the optimizer updates of these trained parameters, in fp32 where the model has 16 bits, whole and on every rank.
        Collective.
        """
        self._lead()
        own = {name: {_UPDATED: self._updated[name].detach()} for name in names if name in self._updated}
        found = gathered_optimizer(own, self._ownership, self._communicator, names)
        return {name: found[name][_UPDATED] for name in names}

    def needs(self, keys: Sequence[str]) -> bool:
        """Whether `load` reads on this rank what these keys lead to."""
        if self._ownership.whole:
            return True
        part, *path = keys
        # A name may contain what keys are joined by.
        return "/".join(path) in self._held if part == "model" else self._masters.reads("/".join(path[:-1]), path[-1])

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `whole`; what is not needed here may be left out. Raises CheckpointError."""
        if self._ownership.whole:
            with _in_place():
                self._module.load_state_dict({name: as_tensor(value) for name, value in state["model"].items()})
        else:
            # Nothing, on an idle rank.
            rank = self._communicator.rank
            restored_model(self._module, state.get("model", {}), self._ownership, rank, self._shards)
        optimizer = state.get("optimizer", {})
        unknown = sorted(set(optimizer) - set(self._trained))
        if unknown:
            raise CheckpointError(
                f"the optimizer's state names parameters that the model does not train: {', '.join(unknown[:5])}"
            )
        load_options(self._optimizer, self._updated, state.get(_OPTIONS, {}))
        own = {name: values for name, values in optimizer.items() if name in self._masters.names}
        own = own_boxes(own, self._ownership, self._communicator.rank)
        load_state_by_name(self._optimizer, self._updated, self._masters.load(own))

    def _lead(self) -> None:
        """Bring those up to date that do not train. Collective."""
        if self._ownership.whole and self._followers:
            share_whole_state(
                self._module,
                self._optimizer,
                self._updated,
                self._communicator,
                leader=self._leader,
                followers=self._followers,
                masters=self._masters.masters,
            )
            self._masters.refresh()

    @property
    def _alike(self) -> bool:
        """Every rank has the whole model, and the same one."""
        return self._ownership.whole and not self._drifts

    def _options(self, *, everywhere: bool = False) -> dict[str, Any]:
        """Of the optimizer's groups, where these are the user's: those of a job follow from it. ``everywhere``: collective."""
        if not self._keeps_options:
            return {}
        own = options_by_name(self._optimizer, self._updated)
        if everywhere:
            by_rank = self._communicator.all_gather_object(own)
            own = {name: options for of in by_rank for name, options in of.items()}
        return {_OPTIONS: own}

    def _of_optimizer(self) -> dict[str, Any]:
        require_kept_by_name(self._optimizer)
        return self._masters.with_masters(state_by_name(self._optimizer, self._updated))


@contextmanager
def _in_place() -> Iterator[None]:
    """`load_state_dict` may be set to swap parameters for new ones, whose gradients nobody would hear of."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
