"""What goes between hosts in a step: as a table, and as a picture of hosts on a circle with an arrow for each direction of a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import cos, hypot, pi, sin
from typing import Any

from heterodyne.cluster.profile import LinkSample
from heterodyne.cluster.spec import Cluster
from heterodyne.plan.plan import Plan
from heterodyne.report.rows import Rows, columns
from heterodyne.report.words import DASH, byte_size, percent
from heterodyne.units import counted, format_bandwidth

__all__ = ["Flow", "flows_of", "traffic_picture", "traffic_rows"]

_WIDEST = 12.0
_RADIUS, _NODE = 330.0, 74.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Flow:
    """Bytes of a step from one host to another. ``bandwidth``: of the link, in bytes a second, and ``busy``: the part of the step in which
    it carries them; None where it is not known."""

    source: str
    target: str
    bytes: int
    bandwidth: float | None
    busy: float | None


def flows_of(plan: Plan, cluster: Cluster, samples: Sequence[LinkSample] = ()) -> list[Flow]:
    """Return what is predicted to go between hosts, the fullest link first. ``samples``: measured links, which count before the file's."""
    predicted = plan.predicted
    if predicted is None:
        return []
    found = []
    for name, size in predicted.traffic.items():
        source, target = name.split(" -> ")
        bandwidth = _bandwidth(cluster, samples, source, target)
        busy = None if bandwidth is None or not predicted.step_s else size / bandwidth / predicted.step_s
        found.append(Flow(source=source, target=target, bytes=size, bandwidth=bandwidth, busy=busy))
    return sorted(found, key=lambda flow: (-(flow.busy or 0.0), -flow.bytes))


def _bandwidth(cluster: Cluster, samples: Sequence[LinkSample], source: str, target: str) -> float | None:
    node_of = {device.id: device.node for device in cluster.devices}
    pair = {source, target}
    measured = [
        sample.bytes / sample.seconds
        for sample in samples
        if sample.op == "send" and sample.seconds and {node_of.get(device) for device in sample.devices} == pair
    ]
    stated = [link.bandwidth_bytes_per_s for link in cluster.links if set(link.between) == pair]
    return max(measured or stated, default=None)


def traffic_rows(flows: Sequence[Flow]) -> Rows:
    """Return a row for each direction of a link that is used."""
    whole = byte_size(sum(flow.bytes for flow in flows))
    return Rows(
        title=f"Between hosts: {whole} a step, over {counted(len(flows), 'link')} (each direction is one)",
        columns=columns("from", "to", ">bytes", ">link", ">busy"),
        rows=tuple(
            (
                flow.source,
                flow.target,
                byte_size(flow.bytes),
                DASH if flow.bandwidth is None else format_bandwidth(flow.bandwidth),
                DASH if flow.busy is None else percent(flow.busy),
            )
            for flow in flows
        ),
        notes=(
            "Messages between stages, gradients and weights; what the devices of a sharded stage exchange is not in it.",
        ),
    )


def traffic_picture(flows: Sequence[Flow]) -> dict[str, Any] | None:
    """Return where hosts and arrows stand, in a square of 1000 by 1000; None without traffic. An arrow is as wide as its link is busy."""
    hosts = list(dict.fromkeys(chain.from_iterable((flow.source, flow.target) for flow in flows)))
    if not hosts:
        return None
    turn = 2 * pi / len(hosts)
    places = {
        h: (500 + _RADIUS * cos(n * turn - pi / 2), 500 + _RADIUS * sin(n * turn - pi / 2)) for n, h in enumerate(hosts)
    }
    most = max(flow.bytes for flow in flows)
    return {
        "hosts": [{"name": host, "x": round(x), "y": round(y)} for host, (x, y) in places.items()],
        "flows": [_arrow(flow, places[flow.source], places[flow.target], most) for flow in flows],
        "radius": round(_NODE),
    }


def _arrow(flow: Flow, start: tuple[float, float], stop: tuple[float, float], most: int) -> dict[str, Any]:
    (x0, y0), (x1, y1) = start, stop
    length = hypot(x1 - x0, y1 - y0)
    along, aside = ((x1 - x0) / length, (y1 - y0) / length), 16.0  # the two directions stand beside each other
    dx, dy = -along[1] * aside, along[0] * aside
    first, last = _NODE + 6, length - _NODE - 20
    part = flow.bytes / most if flow.busy is None else min(1.0, flow.busy)
    label = byte_size(flow.bytes) + ("" if flow.busy is None else f" · {percent(flow.busy)}")
    at = first + (last - first) * 0.36  # nearer to the sender, so that labels of both directions do not meet
    return {
        "x1": round(x0 + along[0] * first + dx),
        "y1": round(y0 + along[1] * first + dy),
        "x2": round(x0 + along[0] * last + dx),
        "y2": round(y0 + along[1] * last + dy),
        "width": round(1.5 + _WIDEST * part, 1),
        "label": label,
        "x": round(x0 + along[0] * at + 2.4 * dx),
        "y": round(y0 + along[1] * at + 2.4 * dy),
        "hover": f"{flow.source} to {flow.target}: {label}",
    }
