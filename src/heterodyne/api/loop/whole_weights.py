"""All weights in the model of every rank for a while, read and changed by the user's own loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from heterodyne.api.loop.weights_back import lacking_room
from heterodyne.api.session import Session
from heterodyne.errors import HeterodyneError, PlanError
from heterodyne.runtime.weights.materialise import exchanged, stored_tensors
from heterodyne.runtime.weights.unheld import UnheldWeights
from heterodyne.runtime.worker import Worker
from heterodyne.units import format_bytes

__all__ = ["WholeWeights"]


class WholeWeights:
    """The weights in full, put in place of what this rank holds of them until `give_back` or `give_up`. Making one is collective.

    Args:
        unheld: the guards of what not every rank holds whole.
        names: of the parameters and buffers that are wanted; empty: all.

    Values are copies: what the rank holds is set aside, so that an error leaves it as it was. They are on the host where the plan cuts
    the model, whose whole weights a device may not have the memory for, else on the device.

    Raises PlanError where a host has no room, or weights were changed before in a way that is refused; HeterodyneError for an unknown name.
    """

    def __init__(self, worker: Worker, session: Session, unheld: UnheldWeights, names: Sequence[str]) -> None:
        self._worker, self._session = worker, session
        session.together(worker.require_as_left)
        stored = dict(stored_tensors(worker.module))
        unknown = [name for name in names if name not in stored]
        if unknown:
            raise HeterodyneError(f"the model has no parameter or buffer {unknown[0]!r}")
        self._tensors = {name: tensor for name, tensor in stored.items() if not names or name in names}
        _require_room(worker, session, self._tensors)
        self._stack = ExitStack()
        self._stack.enter_context(worker.state.lent())
        values = _copies(worker, self._tensors)
        self._dtypes = {name: value.dtype for name, value in values.items()}
        self._before = {name: _digest(value) for name, value in values.items()}
        self._aside = {name: tensor.data for name, tensor in self._tensors.items() if not tensor.is_meta}
        self._gradients = {name: tensor.grad for name, tensor in self._tensors.items()}
        for name, tensor in self._tensors.items():
            tensor.grad = None  # it has the shape of what the rank holds
            _put(tensor, values.pop(name))
        self._stack.enter_context(unheld.there(self._tensors))

    def give_back(self) -> None:
        """Let each rank hold what it held, with the changes. Collective. Raises PlanError, on every rank, if they are not alike."""
        values = {name: tensor.data for name, tensor in self._tensors.items()}
        try:
            of_ranks = self._session.agreement.gather_or_raise(self._changed)
            _require_alike(of_ranks)
        except HeterodyneError:
            self._restore({})
            raise
        self._restore({name: values[name] for name in of_ranks[0]})

    def give_up(self, error: BaseException) -> None:
        """Let each rank hold what it held, because of an error of this one, which other ranks hear of at the end of their block."""
        self._restore({})
        if not isinstance(error, Exception):
            return  # this process is to end at once

        def tell() -> None:
            raise PlanError(
                f"rank {self._session.rank} left 'with trainer.whole_weights()' by an error, so the weights are as they were before "
                f"({type(error).__name__}: {error})"
            )

        with suppress(HeterodyneError):
            self._session.together(tell)

    def _changed(self) -> dict[str, str]:
        """Return digests of what was changed. Raises PlanError for what cannot be given back."""
        now = dict(stored_tensors(self._worker.module))
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor:
                raise PlanError(f"{name!r} was replaced by another object: change it in place ({name}.copy_(...))")
            if tuple(tensor.shape) != tuple(self._worker.ownership.shapes[name]) or tensor.dtype != self._dtypes[name]:
                raise PlanError(f"{name!r} got another shape or type, which the plan was not made for")
        found = {name: _digest(tensor.data) for name, tensor in self._tensors.items()}
        return {name: digest for name, digest in found.items() if digest != self._before[name]}

    def _restore(self, changed: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            tensor.grad = None
            _put(tensor, self._aside.get(name, torch.empty_like(tensor, device="meta")))
            tensor.grad = self._gradients[name]
        self._worker.state.put(changed)
        self._stack.close()


def _copies(worker: Worker, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole values, in memory of their own. Collective."""
    found = worker.state.tensors(names=tensors.keys())
    for name, value in found.items():
        device = worker.device if worker.ownership.whole else torch.device("cpu")
        own = (
            not tensors[name].is_meta
            and value.untyped_storage().data_ptr() == tensors[name].untyped_storage().data_ptr()
        )
        found[name] = value.to(device, copy=own)
    return found


def _put(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor, the same object, the memory of another."""
    if torch._has_compatible_shallow_copy_type(tensor, value):
        tensor.data = value
    elif exchanged(tensor, value) is not tensor:
        raise PlanError("torch cannot exchange the memory of a weight that something refers to weakly")


def _digest(tensor: Tensor) -> str:
    """Return a hash of all bytes."""
    found = hashlib.blake2b(digest_size=16)
    if tensor.numel():
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _require_room(worker: Worker, session: Session, tensors: Mapping[str, Tensor]) -> None:
    """Raise PlanError, on every rank, if a host has no room for copies of the tensors."""
    shapes = worker.ownership.shapes
    size = sum(tensor.element_size() * torch.Size(shapes[name]).numel() for name, tensor in tensors.items())
    lacking = lacking_room(session, size)
    if lacking is not None:
        host, needed, free = lacking
        raise PlanError(
            f"the host {host} has no room for trainer.whole_weights(): {format_bytes(needed)} are needed for these weights on each of its "
            f"ranks, with half of that to spare, and {format_bytes(free)} are available. Name the few weights that you need "
            "(trainer.whole_weights('head.weight')); a moving average is kept in parts by trainer.average(decay)"
        )


def _require_alike(of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise PlanError if ranks have changed other weights, or to other values, than rank 0."""
    for name in sorted({name for changed in of_ranks for name in changed}):
        others = [rank for rank, changed in enumerate(of_ranks) if changed.get(name) != of_ranks[0].get(name)]
        if others:
            which = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
            raise PlanError(
                f"{name!r} has other values on {which} than on rank 0 at the end of 'with trainer.whole_weights()': change weights alike "
                "on every rank (without 'if rank == 0', and with a seed where random numbers are drawn). They are as they were before"
            )
