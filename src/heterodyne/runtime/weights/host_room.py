"""Whether hosts have room for what a plan keeps there, optimizer state and activations, before anything is made."""

from __future__ import annotations

import socket

import psutil

from heterodyne.errors import PlanError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.units import format_bytes

__all__ = ["require_host_room"]

_VALUES = 4
"""fp32 values that the host keeps of each element with AdamW: the weight, its gradient, two moments."""


def require_host_room(communicator: Communicator, *, elements: int, activation_bytes: int) -> None:
    """Raises PlanError, on every rank, for a host that has too little memory left for what its ranks keep there. Collective.

    ``elements``: of which this rank keeps the optimizer's state there. ``activation_bytes``: of activations that wait there at a time.
    """
    own = (4 * _VALUES * elements, activation_bytes)
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
