"""Whether hosts have room for the optimizer state that is kept there, before anything is made."""

from __future__ import annotations

import socket
from collections.abc import Mapping

import psutil
from torch import nn

from heterodyne.errors import PlanError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.units import format_bytes

__all__ = ["require_host_room"]

_VALUES = 4
"""fp32 values that the host keeps of each parameter with AdamW: the weight, its gradient, two moments."""


def require_host_room(parameters: Mapping[str, nn.Parameter], communicator: Communicator, *, on_host: bool) -> None:
    """Raises PlanError, on every rank, for a host that has too little memory left for what its ranks keep there. Collective."""
    own = sum(4 * _VALUES * p.numel() for p in parameters.values()) if on_host else 0
    told = communicator.all_gather_object((socket.gethostname(), own, psutil.virtual_memory().available))
    for host in dict.fromkeys(name for name, _, _ in told):
        needed = sum(size for name, size, _ in told if name == host)
        left = min(free for name, _, free in told if name == host)
        if needed > left:
            raise PlanError(
                f"the plan keeps optimizer state in the memory of host {host}, which takes {format_bytes(needed)}, and there "
                f"{format_bytes(left)} are left: leave 'offload' out of some of its stages, or free memory"
            )
