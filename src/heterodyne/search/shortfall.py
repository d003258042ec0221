"""By how much devices lack the memory for a model, with everything shared out and offloaded, and how many more would do."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from heterodyne.units import format_bytes

__all__ = ["shortfall"]


def shortfall(rooms: Mapping[str, tuple[int, int]], *, on_devices: int, on_hosts: int, least: int = 1) -> str:
    """A sentence on what all devices hold together, were nothing there twice and no activations kept.

    Args:
        rooms: of each kind of device how many there are, and the bytes that a plan may fill of one.
        on_devices: bytes of parameters and gradients, and of whatever else has to be on the devices.
        on_hosts: bytes of the optimizer's state, where it may be in the memory of hosts.
        least: bytes that a device has to have room for to be of use.
    """
    there = sum(count * room for count, room in rooms.values())
    state = (
        f"parameters and gradients take {format_bytes(on_devices)} once, with the optimizer's state "
        f"({format_bytes(on_hosts)}) on hosts"
        if on_hosts
        else f"parameters, gradients and optimizer state take {format_bytes(on_devices)} once"
    )
    together = f"everything shared out, {state}; all devices together have room for {format_bytes(max(0, there))}"
    if on_devices <= there:
        return f"{together}, but not for what a step needs beside"
    kind, (_, room) = max(rooms.items(), key=lambda item: item[1][1])
    lacking = on_devices - there
    more = "" if room < least else f": {ceil(lacking / room):,} more of {kind} would hold that"
    return f"{together}, {format_bytes(lacking)} too little{more}"
