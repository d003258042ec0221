"""The cluster file: machines as a person describes them, in YAML with units.

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

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from heterodyne.cluster.catalog import find, lookup
from heterodyne.cluster.file_values import CATALOG_LINK_LATENCY_S, Count, DevicesEntry, LinkValues, Memory, Name, some
from heterodyne.cluster.fleet import Fleet
from heterodyne.cluster.fleet_cluster import cluster_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.spec import Cluster, Device, Link
from heterodyne.documents import Location, Section, read_yaml, validate
from heterodyne.errors import ClusterError

__all__ = ["CATALOG_LINK_LATENCY_S", "catalog_link", "load_cluster"]

# What only a fleet file has: at its top, in its nodes, in its links.
_OF_FLEETS: Mapping[str, frozenset[str]] = {
    "": frozenset({"regions", "zones", "pods", "kinds", "prices", "spot"}),
    "nodes": frozenset({"kind", "devices_per_node", "memory", "usd_per_hour", "spot", "watts"}),
    "links": frozenset({"usd_per_gb"}),
}


def _between(ends: object) -> object:
    if ends == "all" or (isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, str) for end in ends)):
        return ends
    raise ValueError(f"{ends!r} is neither two nodes, as in '[new, old]', nor 'all'")


class _Node(Section):
    """``link: null`` says that nothing is known of it; without the key the catalog is asked."""

    name: Name
    count: Count | None = None
    devices: Annotated[tuple[DevicesEntry, ...], AfterValidator(some)]
    host_memory: Memory | None = None
    link: LinkValues | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.count is None else tuple(f"{self.name}-{i}" for i in range(self.count))


class _Link(LinkValues):
    between: Annotated[tuple[str, str] | Literal["all"], BeforeValidator(_between)]


class _File(Section):
    name: Annotated[str, Field(min_length=1)] = "cluster"
    nodes: Annotated[tuple[_Node, ...], AfterValidator(some)]
    links: tuple[_Link, ...] = ()


def load_cluster(path: Path | str) -> Cluster:
    """The cluster that a YAML file describes: a cluster file, or a fleet file of at most 4,096 devices.

    Raises ClusterError with the line of what is wrong and the remedy.
    """
    path = Path(path)
    content, lines = read_yaml(path, ClusterError)
    if not isinstance(content, dict):
        raise ClusterError(
            "a cluster is a mapping with name, nodes and, if it has several nodes, links", path=str(path), line=1
        )
    if _speaks_of_a_fleet(content):
        return _listed(load_fleet(path), path)
    file = validate(_File, content, error=ClusterError, path=str(path), lines=lines)
    return _Reader(file, str(path), lines).cluster()


def _speaks_of_a_fleet(content: Mapping[str, object]) -> bool:
    for section, keys in _OF_FLEETS.items():
        items = content.get(section) if section else [content]
        if isinstance(items, list) and any(isinstance(item, dict) and not keys.isdisjoint(item) for item in items):
            return True
    return False


def _listed(fleet: Fleet, path: Path) -> Cluster:
    try:
        return cluster_of(fleet)
    except ClusterError as error:
        raise ClusterError(str(error), path=str(path)) from error


def catalog_link(node: str, kinds: list[str]) -> Link | None:
    """The link among devices of these kinds in one node, by the slowest that the catalog states; None if one is not stated."""
    found = [find(kind) for kind in kinds]
    speeds = [a.link_bandwidth_bytes_per_s if a else None for a in found]
    known = [speed for speed in speeds if speed is not None]
    if len(kinds) < 2 or len(known) < len(speeds):
        return None
    return Link(between=(node, node), bandwidth_bytes_per_s=min(known), latency_s=CATALOG_LINK_LATENCY_S)


class _Reader:
    """A valid file on its way to a Cluster: what only the whole file can tell."""

    def __init__(self, file: _File, path: str, lines: Mapping[Location, int]) -> None:
        self._file = file
        self._path = path
        self._lines = lines
        self._groups: dict[str, tuple[str, ...]] = {}

    def cluster(self) -> Cluster:
        devices: list[Device] = []
        links: list[Link] = []
        taken: dict[str, int] = {}
        for index, node in enumerate(self._file.nodes):
            line = self._lines.get(("nodes", index, "name"))
            for name in {node.name, *node.names}:
                if name in taken:
                    raise self._error(f"the node {name!r} is there already (line {taken[name]})", line)
            taken.update(dict.fromkeys((node.name, *node.names), line or 0))
            self._groups |= {name: (name,) for name in node.names} | {node.name: node.names}
            for name in node.names:
                here = list(self._devices(index, node, name))
                devices += here
                links += self._inner_link(node, name, [d.kind for d in here])
        links += self._outer_links()
        hosts = {
            name: node.host_memory for node in self._file.nodes if node.host_memory is not None for name in node.names
        }
        return Cluster(name=self._file.name, devices=tuple(devices), links=tuple(links), hosts=hosts)

    def _devices(self, index: int, node: _Node, name: str) -> Iterator[Device]:
        counted: Counter[str] = Counter()
        for place, entry in enumerate(node.devices):
            known = find(entry.kind)
            kind = known.kind if known else entry.kind
            memory = entry.memory if entry.memory is not None else known.memory_bytes if known else None
            if memory is None:
                raise self._no_memory(entry.kind, self._lines.get(("nodes", index, "devices", place)))
            backend = entry.backend or (known.backend if known else "cpu" if kind == "cpu" else "cuda")
            for _ in range(entry.count):
                yield Device(
                    id=f"{name}/{kind}:{counted[kind]}", kind=kind, node=name, memory_bytes=memory, backend=backend
                )
                counted[kind] += 1

    def _no_memory(self, kind: str, line: int | None) -> ClusterError:
        if kind == "cpu":
            return self._error("a cpu needs 'memory': how much each worker may use, as in 'memory: 16 GiB'", line)
        if find(kind) is not None:
            return self._error(
                f"the catalog knows {kind!r} but not its memory; give 'memory', as in 'memory: 64 GB'", line
            )
        try:
            lookup(kind)
        except ClusterError as unknown:
            return self._error(f"{unknown} Or, if that is its name, give its 'memory', as in 'memory: 64 GB'", line)
        raise AssertionError(kind)

    def _inner_link(self, node: _Node, name: str, kinds: list[str]) -> list[Link]:
        if node.link is not None:
            return [_link(name, name, node.link)]
        default = None if "link" in node.model_fields_set else catalog_link(name, kinds)
        return [] if default is None else [default]

    def _outer_links(self) -> list[Link]:
        """What `links` says, pair by pair; a pair that is given twice is a contradiction, and ``all`` gives way to any other."""
        given: dict[frozenset[str], tuple[Link, int | None]] = {}
        default: tuple[_Link, int | None] | None = None
        for index, entry in enumerate(self._file.links):
            line = self._lines.get(("links", index))
            if isinstance(entry.between, str):
                if default is not None:
                    raise self._error(f"'between: all' is given twice (first on line {default[1]})", line)
                default = (entry, line)
                continue
            for a, b in self._pairs(entry.between, line):
                pair = frozenset((a, b))
                if pair in given:
                    raise self._error(
                        f"the link between {a} and {b} is given twice (first on line {given[pair][1]})", line
                    )
                given[pair] = (_link(a, b, entry), line)
        links = [link for link, _ in given.values()]
        if default is not None:
            names = [name for node in self._file.nodes for name in node.names]
            links += [_link(a, b, default[0]) for a, b in combinations(names, 2) if frozenset((a, b)) not in given]
        return links

    def _pairs(self, between: tuple[str, str], line: int | None) -> list[tuple[str, str]]:
        for end in between:
            if end not in self._groups:
                raise self._error(f"there is no node {end!r}; the nodes are {', '.join(self._groups)}", line)
        left, right = (self._groups[end] for end in between)
        pairs = list(combinations(left, 2)) if between[0] == between[1] else list(product(left, right))
        if not pairs or any(a == b for a, b in pairs):
            raise self._error(
                f"'between: [{', '.join(between)}]' joins a node with itself; give its inner link as 'link' of the node",
                line,
            )
        return pairs

    def _error(self, message: str, line: int | None) -> ClusterError:
        return ClusterError(message, path=self._path, line=line)


def _link(a: str, b: str, values: LinkValues) -> Link:
    return Link(between=(a, b), bandwidth_bytes_per_s=values.bandwidth, latency_s=values.latency)
