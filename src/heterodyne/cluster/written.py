"""A Cluster written down: as the YAML that a person would write, or as JSON that holds any Cluster exactly."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import yaml

from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.errors import ClusterError, UnitError
from heterodyne.json_files import checked, parse_json
from heterodyne.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)

__all__ = ["cluster_from_json", "cluster_to_json", "dump_cluster"]

CLUSTER_VERSION = 1


def dump_cluster(cluster: Cluster) -> str:
    """YAML text that `load_cluster` reads as an equal cluster.

    Raises ClusterError for a cluster that no file describes: ids that are not ``node/kind:number``, nodes whose devices do not
    stand together, a kind under a name that the catalog calls otherwise.
    """
    nodes: list[dict[str, object]] = []
    for name, devices in groupby(cluster.devices, key=lambda d: d.node):
        node: dict[str, object] = {"name": name, "devices": [_entry(list(run)) for _, run in groupby(devices, _alike)]}
        if name in cluster.hosts:
            node["host_memory"] = _exact(cluster.hosts[name], format_bytes, parse_bytes, "B")
        inner = next((link for link in cluster.links if set(link.between) == {name}), None)
        nodes.append({**node, "link": None if inner is None else _values(inner)})
    outer = [{"between": list(link.between), **_values(link)} for link in cluster.links if len(set(link.between)) == 2]
    content: dict[str, object] = {"name": cluster.name, "nodes": nodes, **({"links": outer} if outer else {})}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)
    _check(text, cluster)
    return text


def cluster_to_json(cluster: Cluster) -> str:
    """JSON text of any cluster; `cluster_from_json` is its inverse."""
    return json.dumps({"version": CLUSTER_VERSION, **asdict(cluster)}, indent=1) + "\n"


def cluster_from_json(text: str, *, path: str | None = None) -> Cluster:
    """The inverse of `cluster_to_json`. Raises ClusterError for anything else."""
    try:
        content = dict(parse_json(text))
        version = content.pop("version", None)
        if version != CLUSTER_VERSION:
            raise ValueError(f"version {version!r} is not {CLUSTER_VERSION}")
        return checked(Cluster, content)
    except (ValueError, TypeError) as error:
        raise ClusterError(f"not a cluster as it was saved ({error})", path=path) from error


def _alike(device: Device) -> tuple[str, int, str]:
    return device.kind, device.memory_bytes, device.backend


def _entry(run: list[Device]) -> dict[str, object]:
    first = run[0]
    return {
        "kind": first.kind,
        "count": len(run),
        "memory": _exact(first.memory_bytes, format_bytes, parse_bytes, "B"),
        "backend": first.backend,
    }


def _values(link: Link) -> dict[str, object]:
    return {
        "bandwidth": _exact(link.bandwidth_bytes_per_s, format_bandwidth, parse_bandwidth, "B/s"),
        "latency": _exact(link.latency_s, format_seconds, parse_seconds, "s"),
    }


def _exact(value: float, pretty: Callable[[float], str], parse: Callable[[str], float], unit: str) -> str:
    """The first of the readable forms that means the very same number, else the number in its base unit."""
    for text in (pretty(value), f"{value / 1e9:.6g} G{unit}"):
        try:
            if parse(text) == value:
                return text
        except UnitError:
            continue
    return f"{value!r} {unit}"


def _check(text: str, cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        reason = "ids, names or the order of devices and links are not those that a file gives"
        try:
            same = load_cluster(path) == cluster
        except ClusterError as error:
            same, reason = False, str(error)
    if not same:
        raise ClusterError(f"cluster {cluster.name!r} cannot be written as YAML ({reason}); save it as JSON")
