"""A Cluster written down: as JSON, which holds any Cluster exactly, and as a cluster file for commands that take one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import yaml

from heterodyne.cluster.spec import Cluster, Link
from heterodyne.errors import ClusterError
from heterodyne.json_files import checked, parse_json
from heterodyne.text_files import read_text

__all__ = ["cluster_from_json", "cluster_to_json", "cluster_to_yaml", "is_written", "read_cluster"]

CLUSTER_VERSION = 1


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
        raise ClusterError(
            f"not a cluster as a run saves it ({error}): name the cluster.json of a run, or describe the devices in a .yaml file",
            path=path,
        ) from error


def is_written(path: Path) -> bool:
    """Return whether a file is named as one that a run has written down, and not as one that a person writes."""
    return path.suffix == ".json"


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a run has written down. Raises ClusterError."""
    try:
        return cluster_from_json(read_text(path), path=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ClusterError(f"cannot be read: {reason}", path=str(path)) from error


def cluster_to_yaml(cluster: Cluster) -> str:
    """Return the text of a cluster file with an entry for each device: `load_cluster` reads the same cluster from it, as long as the ids
    are those that a cluster file gives.
    """

    def wire(link: Link) -> dict[str, object]:
        return {"bandwidth": f"{link.bandwidth_bytes_per_s!r} B/s", "latency": f"{link.latency_s!r} s"}

    nodes: list[dict[str, object]] = [
        {
            "name": name,
            "devices": [
                {"kind": d.kind, "memory": f"{d.memory_bytes} B", "backend": d.backend}
                for d in cluster.devices
                if d.node == name
            ],
            "link": next((wire(link) for link in cluster.links if set(link.between) == {name}), None),
            **({"host_memory": f"{cluster.hosts[name]} B"} if name in cluster.hosts else {}),
        }
        for name in dict.fromkeys(d.node for d in cluster.devices)
    ]
    outer = [{"between": list(link.between), **wire(link)} for link in cluster.links if len(set(link.between)) == 2]
    return yaml.safe_dump({"name": cluster.name, "nodes": nodes, "links": outer})
