"""Tables of what was found."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.doctor.facts import HostFacts
from heterodyne.doctor.faults import Fault, LinkFacts
from heterodyne.report.rows import Rows, columns
from heterodyne.report.words import DASH, byte_size, seconds
from heterodyne.units import format_bandwidth

__all__ = ["fault_rows", "host_rows", "link_rows"]


def host_rows(hosts: Sequence[HostFacts], interfaces: Sequence[str]) -> Rows:
    """Return one row for each host. ``interfaces``: by which each reaches the first."""
    return Rows(
        title="Hosts",
        columns=columns("host", "devices", ">cores", ">busy", ">free memory", "interface", "versions"),
        rows=tuple(
            (
                facts.host,
                ", ".join(f"{d.kind} {byte_size(d.free_bytes)} free" for d in facts.devices) or "CPU alone",
                str(facts.cores),
                f"{facts.load:.1f}",
                byte_size(facts.memory_bytes),
                interface or DASH,
                ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
            )
            for facts, interface in zip(hosts, interfaces, strict=True)
        ),
    )


def link_rows(links: Sequence[LinkFacts]) -> Rows:
    """Return one row for each pair of hosts."""
    return Rows(
        title="Links, measured from process to process",
        columns=columns("between", ">bandwidth", ">latency"),
        rows=tuple(
            (" - ".join(link.hosts), format_bandwidth(link.bandwidth_bytes_per_s), seconds(link.latency_s))
            for link in links
        ),
    )


def fault_rows(faults: Sequence[Fault]) -> Rows:
    """Return what is wrong, and what to do about it."""
    return Rows(
        title="What is wrong",
        columns=columns("host", "fault", "remedy"),
        rows=tuple((fault.host, fault.what, fault.remedy) for fault in faults),
    )
