"""Which precision each kind of device takes, where the job leaves it to them or asks for one that they have no units for."""

from __future__ import annotations

from typing import Literal

from heterodyne.api.session import Session
from heterodyne.measure.discover import has_bf16_units
from heterodyne.plan.precision import Precision, Precisions, in_words, of_kind

__all__ = ["Asked", "resolved"]

Asked = Literal["fp32", "bf16", "fp16", "auto"]


def resolved(session: Session, asked: Asked) -> Precisions:
    """The precision of all devices, or of each kind; the same on every rank. Says what bf16 costs where there are no units. Collective."""
    if asked in ("fp32", "fp16"):
        return asked
    units = session.communicator.all_gather_object(has_bf16_units(session.device))
    devices = session.cluster.devices
    found: dict[str, Precision] = {}
    without: list[str] = []
    for device, has in zip(devices, units, strict=True):
        if not has and device.backend != "cpu" and device.kind not in without:
            without.append(device.kind)
        found[device.kind] = of_kind(device.backend, bf16_units=device.kind not in without)
    if asked == "bf16":
        if without:
            session.say(
                f"{', '.join(without)} has no units for bf16: products there are computed in fp32 and rounded, slower than in fp32 itself. "
                "With precision auto it would take fp16 and a scaled loss, and the others bf16"
            )
        return asked
    kinds = set(found.values())
    precisions: Precisions = kinds.pop() if len(kinds) == 1 else found
    session.say(f"precision auto: {in_words(precisions)}")
    return precisions
