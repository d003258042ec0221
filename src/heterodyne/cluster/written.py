"""A Cluster written down as JSON, which holds any Cluster exactly."""

from __future__ import annotations

import json
from dataclasses import asdict

from heterodyne.cluster.spec import Cluster
from heterodyne.errors import ClusterError
from heterodyne.json_files import checked, parse_json

__all__ = ["cluster_from_json", "cluster_to_json"]

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
        raise ClusterError(f"not a cluster as it was saved ({error})", path=path) from error
