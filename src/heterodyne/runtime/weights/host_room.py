"""Whether hosts have room for what a plan keeps there, optimizer state and activations, before anything is made."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil
from torch import Tensor

from heterodyne.errors import PlanError
from heterodyne.job import OptimizerSection
from heterodyne.plan.optimizer_state import host_values
from heterodyne.plan.state_shards import Range
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.weights.optimizer import OptimizerFactory
from heterodyne.units import format_bytes

__all__ = ["host_state_bytes", "require_host_room"]


def host_state_bytes(
    parameters: Mapping[str, Tensor], slices: Mapping[str, Range], optimizer: OptimizerSection | OptimizerFactory
) -> int:
    """Bytes of weights, gradients and state of the slices that a rank updates on its host; of parameters without one, all of it. An
    optimizer that is made elsewhere is taken for AdamW."""
    section = optimizer if isinstance(optimizer, OptimizerSection) else OptimizerSection()
    total = 0.0
    for name, parameter in parameters.items():
        start, stop = slices.get(name, (0, parameter.numel()))
        values = host_values(section.name, section.momentum, parameter.shape)
        total += (stop - start) / max(1, parameter.numel()) * max(4, parameter.element_size()) * values
    return round(total)


def require_host_room(communicator: Communicator, *, state_bytes: int, activation_bytes: int) -> None:
    """Raises PlanError, on every rank, for a host that has too little memory left for what its ranks keep there. Collective.

    ``state_bytes``: of what this rank updates there, with weights and gradients. ``activation_bytes``: of activations that wait there at
    a time.
    """
    own = (state_bytes, activation_bytes)
    told = communicator.all_gather_object((socket.gethostname(), *own, psutil.virtual_memory().available))
    faults = []
    for host in dict.fromkeys(name for name, *_ in told):
        of_host = [(state, activations, free) for name, state, activations, free in told if name == host]
        kept = {
            ("optimizer state", "offload"): sum(state for state, *_ in of_host),
            ("activations", "offload_activations"): sum(activations for _, activations, _ in of_host),
        }
        left = min(free for *_, free in of_host)
        if sum(kept.values()) <= left:
            continue
        parts = {what: size for what, size in kept.items() if size}
        keeps = " and ".join(f"{what} ({format_bytes(size)})" for (what, _), size in parts.items())
        fields = " or ".join(repr(field) for _, field in parts)
        faults.append(
            f"the plan keeps {keeps} in the memory of host {host}, where {format_bytes(left)} are left: leave {fields} out of some of its "
            "stages, or free memory"
        )
    if faults:
        raise PlanError("; ".join(faults))
