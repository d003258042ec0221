"""What was measured, as tables: blocks by device and micro-batch size, and the links."""

from __future__ import annotations

from heterodyne.cluster.profile import WHOLE, Profile
from heterodyne.report.rows import Column, Rows
from heterodyne.report.words import percent, seconds
from heterodyne.units import format_bandwidth, format_bytes

__all__ = ["profile_rows"]


def profile_rows(profile: Profile, model: str) -> tuple[Rows, ...]:
    """One table of the blocks, one of the links."""
    return _block_rows(profile, model), _link_rows(profile)


def _block_rows(profile: Profile, model: str) -> Rows:
    rows = []
    for device, measured in profile.devices.items():
        for kind, samples in measured.blocks.items():
            rows += [
                (
                    device,
                    "the whole model" if kind == WHOLE else profile.kinds.get(kind, kind),
                    str(sample.micro_batch_size),
                    seconds(sample.forward_s),
                    seconds(sample.backward_s),
                    "extrapolated" if sample.extrapolated else percent(sample.spread),
                    format_bytes(sample.saved_bytes),
                )
                for sample in samples
            ]
    return Rows(
        title=f"{model}: forward and backward of each distinct block",
        columns=(
            Column(title="device"),
            Column(title="block"),
            Column(title="samples", align="right"),
            Column(title="forward", align="right"),
            Column(title="backward", align="right"),
            Column(title="spread", align="right"),
            Column(title="kept", align="right"),
        ),
        rows=tuple(rows),
        notes=(
            "times are medians while all devices compute; spread is the distance of the quartiles over the median; "
            "extrapolated: too large, or too long, to measure, or nothing to gain by it; from the smaller sizes",
            *(
                f"{device} was measured while others had {percent(own.taken_by_others)} of its host's cores"
                for device, own in profile.devices.items()
                if own.taken_by_others
            ),
        ),
    )


def _link_rows(profile: Profile) -> Rows:
    return Rows(
        title="Links",
        columns=(
            Column(title="what"),
            Column(title="between"),
            Column(title="message", align="right"),
            Column(title="time", align="right"),
            Column(title="spread", align="right"),
            Column(title="rate", align="right"),
        ),
        rows=tuple(
            (
                link.op,
                " ".join(link.devices) if len(link.devices) < 3 else f"{len(link.devices)} devices",
                format_bytes(link.bytes),
                seconds(link.seconds),
                percent(link.spread),
                format_bandwidth(link.bytes / link.seconds) if link.seconds else "",
            )
            for link in profile.links
        ),
    )
