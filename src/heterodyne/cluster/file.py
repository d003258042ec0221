"""The cluster file: a fleet file (`cluster.fleet_file`) of which each device is listed.

    name: lab
    nodes:
      - name: new
        count: 2                                          # new-0 and new-1
        devices: [{kind: A100-SXM-80GB, count: 4}]        # memory from the catalog
        link: {bandwidth: 300 GB/s, latency: 5 us}        # among the devices of the node; default: the catalog's
      - name: old
        devices: [{kind: V100-SXM2-16GB, count: 8, memory: 16 GB}]
    links:
      - {between: [new, old], bandwidth: 50 Gb/s, latency: 30 us}
      - {between: all, bandwidth: 25 GB/s, latency: 10 us}    # every other pair of nodes

Ranks follow the order of the file. A kind that the catalog knows by another name gets the catalog's name.
"""

from __future__ import annotations

from pathlib import Path

from heterodyne.cluster.catalog import find
from heterodyne.cluster.file_values import CATALOG_LINK_LATENCY_S
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.spec import Cluster, Link
from heterodyne.cluster.written import is_written, read_cluster
from heterodyne.errors import ClusterError

__all__ = ["catalog_link", "load_cluster"]


def load_cluster(path: Path | str) -> Cluster:
    """Return the cluster that a YAML file of at most 4,096 devices describes, or that a run has written down (``cluster.json``).

    Raises ClusterError with the line of what is wrong and the remedy.
    """
    if is_written(Path(path)):
        return read_cluster(Path(path))
    fleet = load_fleet(Path(path))
    try:
        return cluster_of(fleet)
    except ClusterError as error:
        raise ClusterError(str(error), path=str(path)) from error


def catalog_link(node: str, kinds: list[str]) -> Link | None:
    """Return the link among devices of these kinds in one node, by the slowest that the catalog states; None if one is not stated."""
    found = [find(kind) for kind in kinds]
    speeds = [a.link_bandwidth_bytes_per_s if a else None for a in found]
    known = [speed for speed in speeds if speed is not None]
    if len(kinds) < 2 or len(known) < len(speeds):
        return None
    return Link(between=(node, node), bandwidth_bytes_per_s=min(known), latency_s=CATALOG_LINK_LATENCY_S)
