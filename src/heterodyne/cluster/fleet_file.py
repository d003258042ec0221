"""The fleet file: 25,000 accelerators of six kinds in a few lines of YAML with units.

    name: two sites
    kinds:                                                    # what the catalog does not know: four numbers
      NPU-X: {peak_tflops: {bf16: 320}, memory: 64 GB, memory_bandwidth: 1.6 TB/s, link_bandwidth: 200 GB/s, backend: npu}
    prices: {H100-SXM-80GB: 2.9, NPU-X: 1.1}                  # usd per device and hour; a place can have its own
    links:
      - {between: nodes, bandwidth: 400 Gb/s, latency: 5 us}  # of one pod
      - {between: pods, bandwidth: 200 Gb/s, latency: 10 us}  # of one zone
      - {between: regions, bandwidth: 10 Gb/s, latency: 60 ms, usd_per_gb: 0.02}
      - {between: [east/a, west], bandwidth: 5 Gb/s, latency: 80 ms}
    regions:
      - name: east
        zones:
          - name: a
            pods:
              - {name: h100, count: 4, nodes: [{kind: H100-SXM-80GB, count: 64, devices_per_node: 8}]}
      - name: west
        nodes: [{kind: NPU-X, count: 128, devices_per_node: 8, spot: true}]

Regions, zones and pods can each be left out. A cluster file (`cluster.file`) is one, too: nodes of one entry are one pool.
Every link has a place: the narrowest one that covers two nodes counts. A link says what a *node* has towards another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from heterodyne.cluster.file_values import CATALOG_LINK_LATENCY_S, DevicesEntry, LinkValues
from heterodyne.cluster.fleet import Fleet, Pool, Wire, listed
from heterodyne.cluster.fleet_cluster import fleet_of
from heterodyne.cluster.fleet_kinds import Kinds
from heterodyne.cluster.fleet_links import FleetLinks, Place
from heterodyne.cluster.fleet_schema import LEVELS, FileSection, NodeSection, PlaceSection
from heterodyne.cluster.written import is_written, read_cluster
from heterodyne.documents import Location, read_yaml, validate
from heterodyne.errors import ClusterError

__all__ = ["MOST_DEVICES", "MOST_POOLS", "load_fleet"]

MOST_DEVICES = 1_000_000
MOST_POOLS = 4_096


def load_fleet(path: Path) -> Fleet:
    """Return the fleet that a YAML file describes, or that of a cluster which a run has written down (``cluster.json``).

    Raises ClusterError with the line of what is wrong and the remedy.
    """
    if is_written(path):
        return fleet_of(read_cluster(path))
    content, lines = read_yaml(path, ClusterError)
    if not isinstance(content, dict):
        raise ClusterError(
            f"a cluster is a mapping with name, links and one of {', '.join(LEVELS)}", path=str(path), line=1
        )
    file = validate(FileSection, content, error=ClusterError, path=str(path), lines=lines)
    return _Reader(file, str(path), lines).fleet()


@dataclass(frozen=True, kw_only=True)
class _Inherited:
    """What the places around say of what stands in them. ``prices``: usd per device and hour by kind."""

    prices: Mapping[str, float] = field(default_factory=dict)
    spot: bool = False


class _Reader:
    """A valid file on its way to a Fleet: what only the whole file can tell."""

    def __init__(self, file: FileSection, path: str, lines: Mapping[Location, int]) -> None:
        self._file = file
        self._path = path
        self._lines = lines
        flat = bool(file.nodes)
        self._kinds = Kinds(file.kinds, self._error, strict=not flat)
        self._links = FleetLinks(self._error, self._line, flat=flat)
        self._singles = self._named_singly()
        self._taken: dict[str, Location] = {}
        self._prices: dict[Location, str] = {}
        self._devices = 0

    def fleet(self) -> Fleet:
        pools = []
        for pool in self._inside(self._file, (), (), _Inherited()):
            pools.append(pool)
            if len(pools) > MOST_POOLS:
                raise self._error(
                    f"these are more than {MOST_POOLS} pools; is the count of pods right?", self._at(pool)
                )
        self._refuse_shared_names(pools)
        for at, kind in self._prices.items():
            if kind not in {pool.kind for pool in pools}:
                there = listed(dict.fromkeys(pool.kind for pool in pools))
                raise self._error(
                    f"prices {at[-1]!r}, of which there are no devices in the file; there are {there}", at
                )
        bare = Fleet(name=self._file.name, pools=tuple(pools), accelerators=self._kinds.own)
        fleet = self._links.joined(bare, self._file.links)
        joined = (p if p.nodes == 1 else replace(p, between=fleet.wire(p, p)) for p in fleet.pools)
        return replace(fleet, pools=tuple(joined))

    def _inside(
        self, section: FileSection | PlaceSection, place: Place, at: Location, outer: _Inherited
    ) -> Iterator[Pool]:
        """The pools of a place. ``at``: where it stands in the file."""
        level = next(level for level in LEVELS if getattr(section, level, ()))
        here = self._inherited(section, at, outer)
        self._links.hold(place, level)
        if level == "nodes":
            yield from self._nodes(getattr(section, level), place, (*at, level), here)
            return
        for index, child in enumerate(getattr(section, level)):
            where = (*at, level, index)
            self._take("/".join((*place, child.name)), where)
            for name in child.names:
                inner = (*place, name)
                if name != child.name:
                    self._take("/".join(inner), where)
                self._links.group("/".join((*place, child.name)), "/".join(inner))
                if child.link is not None:
                    self._links.inside("/".join(inner), _wire(child.link), (*where, "link"))
                yield from self._inside(child, inner, where, here)

    def _inherited(self, section: FileSection | PlaceSection, at: Location, outer: _Inherited) -> _Inherited:
        prices = dict(outer.prices)
        for kind, usd in section.prices.items():
            prices[self._kinds.name(kind)] = usd
            self._prices[(*at, "prices", kind)] = self._kinds.name(kind)
        return _Inherited(prices=prices, spot=outer.spot if section.spot is None else section.spot)

    def _nodes(self, sections: tuple[NodeSection, ...], place: Place, at: Location, here: _Inherited) -> Iterator[Pool]:
        for index, section in enumerate(sections):
            where = (*at, index)
            if not place:
                yield from self._top_nodes(section, where, here)
                continue
            name = section.name or ("" if len(sections) == 1 else self._kinds.name(section.entries[0].kind))
            word = "/".join((*place, name) if name else place)
            if name:
                self._take(word, where)
            yield from self._pools(section, word, place, where, here)

    def _top_nodes(self, section: NodeSection, at: Location, here: _Inherited) -> Iterator[Pool]:
        """Nodes that stand in no place: each entry is a place of its own, as nothing says that they share a network."""
        if section.name is None:
            raise self._error(f"{'.'.join(map(str, at))}.name: is missing", at)
        self._take(section.name, at)
        if section.name not in self._singles:
            yield from self._pools(section, section.name, (section.name,), at, here)
            return
        for number in range(section.count or 1):
            name = f"{section.name}-{number}"
            self._take(name, at)
            single = section.model_copy(update={"count": None, "name": name})
            yield from self._pools(single, name, (section.name,), at, here)

    def _named_singly(self) -> frozenset[str]:
        """Counted nodes of which a link names one alone: what it has the others have not, so each of them is a pool."""
        ends = {end for link in self._file.links if isinstance(link.between, tuple) for end in link.between}
        singly = {base for base, dash, number in (end.rpartition("-") for end in ends) if dash and number.isdecimal()}
        return frozenset(s.name for s in self._file.nodes if s.count is not None and s.name in singly)

    def _pools(self, section: NodeSection, name: str, place: Place, at: Location, here: _Inherited) -> Iterator[Pool]:
        runs = [(kind, list(run)) for kind, run in groupby(section.entries, key=_alike)]
        total = sum(entry.count for entry in section.entries)
        named: dict[str, int] = {}
        for _, run in runs:
            entry, where = run[0], self._entry_at(section, run[0], at)
            kind = self._kinds.name(entry.kind)
            memory = self._kinds.memory(entry, where)
            named[kind] = named.get(kind, 0) + 1
            part = kind if named[kind] == 1 else f"{kind}-{named[kind]}"
            pool = Pool(
                name=name if len(runs) == 1 else f"{name}/{part}",
                kind=kind,
                nodes=section.count or 1,
                devices_per_node=sum(e.count for e in run),
                memory_bytes=memory,
                inside=self._inner(section, total, where),
                place=place,
                backend=entry.backend or self._kinds.backend(kind),
                usd_per_device_hour=self._price(section, kind, here),
                spot=here.spot if section.spot is None else section.spot,
                watts_per_device=section.watts or self._kinds.watts(kind),
                node=name,
                numbered=section.count is not None,
                host_memory_bytes=section.host_memory,
            )
            if name != "/".join(place):
                self._links.group(name, pool.name)
            self._devices += pool.devices
            if self._devices > MOST_DEVICES:
                raise self._error(f"these are more than {MOST_DEVICES:,} devices; is the count right?", at)
            yield pool

    def _price(self, section: NodeSection, kind: str, here: _Inherited) -> float | None:
        if section.usd_per_hour is not None:
            return section.usd_per_hour
        return here.prices.get(kind, self._kinds.price(kind))

    def _inner(self, section: NodeSection, total: int, at: Location) -> Wire | None:
        if section.link is not None:
            return _wire(section.link)
        if total < 2 or "link" in section.model_fields_set:
            return None
        kinds = [self._kinds.name(entry.kind) for entry in section.entries]
        slowest = self._kinds.link_bandwidth(kinds, at)
        return Wire(bandwidth_bytes_per_s=slowest, latency_s=CATALOG_LINK_LATENCY_S) if slowest else None

    def _entry_at(self, section: NodeSection, entry: DevicesEntry, at: Location) -> Location:
        return (*at, "kind") if section.kind is not None else (*at, "devices", section.devices.index(entry))

    def _take(self, name: str, at: Location) -> None:
        """Refuse a name that something else has."""
        if name in self._taken and self._taken[name] != at:
            first = self._line((*self._taken[name], "name"))
            raise self._error(f"{name!r} is there already (line {first})", (*at, "name"))
        self._taken[name] = at

    def _refuse_shared_names(self, pools: list[Pool]) -> None:
        """A node may be called ``new-1`` only if there are no nodes ``new-0``, ``new-1``..."""
        counts = {pool.node_name: pool.nodes for pool in pools if pool.numbered}
        for pool in pools:
            base, _, number = pool.node_name.rpartition("-")
            if not pool.numbered and number.isdecimal() and int(number) < counts.get(base, 0):
                first = self._line((*self._taken[base], "name"))
                raise self._error(
                    f"{pool.node_name!r} is there already (line {first}), as a node of {base!r}", self._at(pool)
                )

    def _at(self, pool: Pool) -> Location:
        return (*self._taken.get(pool.node or pool.name, self._taken.get("/".join(pool.place), ())), "name")

    def _line(self, at: Location) -> int | None:
        """Return the line of a place in the file, or of the nearest thing around it that has one."""
        while at and at not in self._lines:
            at = at[:-1]
        return self._lines.get(at)

    def _error(self, message: str, at: Location) -> ClusterError:
        return ClusterError(message, path=self._path, line=self._line(at))


def _alike(entry: DevicesEntry) -> tuple[str, int | None, str | None]:
    return entry.kind, entry.memory, entry.backend


def _wire(values: LinkValues) -> Wire:
    return Wire(bandwidth_bytes_per_s=values.bandwidth, latency_s=values.latency)
