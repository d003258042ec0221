"""The trained weights, back in the user's model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal, TypeAlias

import psutil
from torch import Tensor

from heterodyne.api.session import Session
from heterodyne.runtime.worker import Worker

__all__ = ["WeightsAtEnd", "gathered_weights", "lacking_room"]

WeightsAtEnd: TypeAlias = Literal["all", "rank0", "none"]


def gathered_weights(worker: Worker, session: Session, where: WeightsAtEnd) -> Mapping[str, Tensor]:
    """Return what is missing in this rank's model, to be filled in: all of it where the plan cuts the model, nothing where it does not.

    Collective. Where every rank has the whole model, those that were idle are given the values of the others here. A warning says so
    where the memory of a host is too small for a whole model a rank.
    """
    if where == "none":
        return {}
    if worker.ownership.whole:
        worker.state.tensors()
        return {}
    if where == "all" and lacking_room(session, worker.graph.parameter_bytes + worker.graph.buffer_bytes) is not None:
        warnings.warn(
            "the hosts have no room for the whole model on every rank, so its weights are in the model of rank 0 alone; "
            "RunOptions(weights_at_end='rank0') asks for that, trainer.save_pretrained(path) writes them",
            stacklevel=2,
        )
        where = "rank0"
    return worker.state.tensors(on=None if where == "all" else 0)


def lacking_room(session: Session, bytes_of_rank: float) -> tuple[str, float, float] | None:
    """Return the first host without room for so many bytes more for each of its ranks, and half of that to spare; None if all have it.

    Of what a rank holds already nothing is counted: the bytes are an upper bound. Collective.

    Returns:
        Its name, the bytes that it needs, and those that are available.
    """
    node = session.cluster.devices[session.rank].node
    ranks = sum(device.node == node for device in session.cluster.devices)
    own = (node, ranks * 1.5 * bytes_of_rank, float(psutil.virtual_memory().available))
    return next(
        ((host, needed, free) for host, needed, free in session.communicator.all_gather_object(own) if needed >= free),
        None,
    )
