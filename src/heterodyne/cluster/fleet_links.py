"""The links of a fleet file: from what is said of levels, places and nodes to what joins the pools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations, combinations_with_replacement, product
from typing import Generic, TypeVar

from heterodyne.cluster.fleet import EVERYWHERE, Fleet, Wire, listed
from heterodyne.cluster.fleet_schema import LinkSection
from heterodyne.documents import Location
from heterodyne.errors import ClusterError

__all__ = ["FleetLinks", "Place"]

Place = tuple[str, ...]
Ends = tuple[str, str]
_Value = TypeVar("_Value", Wire, float)
_Error = Callable[[str, Location], ClusterError]


class _Stated(Generic[_Value]):
    """Values by their ends, each with its place in the file; one that is said of a level is replaced by any other."""

    def __init__(self, error: _Error, line: Callable[[Location], int | None]) -> None:
        self._error = error
        self._line = line
        self.at: dict[Ends, Location] = {}
        self.values: dict[Ends, _Value] = {}
        self.of_levels: dict[Ends, tuple[_Value, Location]] = {}

    def put(self, ends: Ends, value: _Value, at: Location) -> None:
        a, b = ends
        first = self.at.get((a, b), self.at.get((b, a)))
        if first is not None:
            said = f"between {a} and {b}" if a != b else f"inside {a}"
            raise self._error(f"the link {said} is given twice (first on line {self._line(first)})", at)
        self.values[ends], self.at[ends] = value, at

    def put_level(self, ends: Ends, value: _Value, at: Location, said: str) -> None:
        if ends in self.of_levels:
            first = self._line(self.of_levels[ends][1])
            raise self._error(f"'between: {said}' is given twice (first on line {first})", at)
        self.of_levels[ends] = value, at

    def all(self) -> dict[Ends, _Value]:
        return {**self.values, **{e: value for e, (value, _) in self.of_levels.items() if e not in self.values}}


class FleetLinks:
    """What joins the pools of a file, while it is read.

    Args:
        error: makes the error for a message and a place in the file.
        line: of a place in the file.
        flat: whether the file has nodes only, where two links of one pair of nodes contradict each other.
    """

    def __init__(self, error: _Error, line: Callable[[Location], int | None], *, flat: bool) -> None:
        self._error = error
        self._flat = flat
        self._wires = _Stated[Wire](error, line)
        self._usd = _Stated[float](error, line)
        self._line = line
        self._all_pay = False
        self._level: dict[str, str] = {}
        self._groups: dict[str, list[str]] = {}

    def hold(self, place: Place, level: str) -> None:
        """A place, and the level of what stands directly in it."""
        self._level["/".join(place) or EVERYWHERE] = level

    def group(self, name: str, member: str) -> None:
        """One of the places or pools that a name of the file stands for."""
        if name != member:
            self._groups.setdefault(name, []).append(member)

    def inside(self, place: str, wire: Wire, at: Location) -> None:
        """Note what the ``link`` of a place says."""
        self._wires.put((place, place), wire, at)

    def joined(self, fleet: Fleet, sections: Iterable[LinkSection]) -> Fleet:
        """The fleet with its links. Raises ClusterError with the line of what is wrong."""
        for index, section in enumerate(sections):
            at: Location = ("links", index)
            wire = None
            if section.bandwidth is not None and section.latency is not None:
                wire = Wire(bandwidth_bytes_per_s=section.bandwidth, latency_s=section.latency)
            if isinstance(section.between, str):
                for place in self._holding(section.between, at):
                    self._put_level((place, place), section, wire, at)
                continue
            for ends in self._ends(section.between, fleet, at):
                if wire is not None:
                    self._wires.put(ends, wire, at)
                if section.usd_per_gb is not None:
                    self._usd.put(ends, section.usd_per_gb / 1e9, at)
        if self._flat:
            self._refuse_overlap(fleet)
        self._stay_free(fleet)
        return self._checked(fleet)

    def _put_level(self, ends: Ends, section: LinkSection, wire: Wire | None, at: Location) -> None:
        said = str(section.between)
        if wire is not None:
            self._wires.put_level(ends, wire, at, said)
        if section.usd_per_gb is not None:
            self._usd.put_level(ends, section.usd_per_gb / 1e9, at, said)
            self._all_pay |= said == "all"

    def _holding(self, level: str, at: Location) -> list[str]:
        if level == "all":
            return [EVERYWHERE]
        holding = [place for place, held in self._level.items() if held == level]
        if not holding:
            there = ", ".join(dict.fromkeys(self._level.values()))
            raise self._error(f"there are no {level} in this file; between can be all, {there}, or two places", at)
        return holding

    def _ends(self, between: Ends, fleet: Fleet, at: Location) -> list[Ends]:
        left, right = (self._words(end, fleet, at) for end in between)
        if between[0] != between[1]:
            return list(product(left, right))
        within = [pool for pool in fleet.pools if not {pool.name, *pool.places}.isdisjoint(left)]
        nodes = {pool.node_name: pool.nodes for pool in within}
        if sum(nodes.values()) == 1:
            raise self._error(
                f"'between: [{', '.join(between)}]' joins a node with itself; give its inner link as 'link' of the node",
                at,
            )
        return list((combinations_with_replacement if len(nodes) == 1 else combinations)(left, 2)) or [
            (left[0], left[0])
        ]

    def _words(self, end: str, fleet: Fleet, at: Location) -> list[str]:
        known = {*fleet.places, *(pool.name for pool in fleet.pools)}
        if end in self._groups:
            return self._groups[end]
        if end not in known:
            raise self._error(
                f"there is no node or place {end!r}; there are {listed(sorted(known | set(self._groups)))}", at
            )
        return [end]

    def _refuse_overlap(self, fleet: Fleet) -> None:
        """In a file of nodes only, a link of a node and one of all the nodes of its entry are two of one pair."""
        entry = {pool.name: pool.place[0] for pool in fleet.pools}
        for (a, b), at in self._wires.at.items():
            for ends in {(entry.get(a, a), b), (a, entry.get(b, b)), (entry.get(a, a), entry.get(b, b))} - {(a, b)}:
                first = self._wires.at.get(ends, self._wires.at.get((ends[1], ends[0])))
                if first is not None:
                    one, other = sorted((first, at), key=lambda place: self._line(place) or 0)
                    raise self._error(
                        f"the link between {a} and {b} is given twice (first on line {self._line(one)})", other
                    )

    def _stay_free(self, fleet: Fleet) -> None:
        """A price between zones is none between the nodes of a zone; one of ``all`` is of every two nodes."""
        for place, level in self._level.items():
            priced = (place, place) in self._usd.values or (place, place) in self._usd.of_levels
            if not priced or level == "nodes" or (place == EVERYWHERE and self._all_pay):
                continue
            depth = 0 if place == EVERYWHERE else place.count("/") + 1
            for inner in {"/".join(p.place[: depth + 1]) for p in fleet.pools if place in (*p.places, EVERYWHERE)}:
                if (inner, inner) not in self._usd.values:
                    self._usd.of_levels.setdefault((inner, inner), (0.0, ()))

    def _checked(self, fleet: Fleet) -> Fleet:
        links, usd = self._wires.all(), self._usd.all()
        try:
            return replace(fleet, links=links, usd_per_byte=usd)
        except ClusterError:
            self._find(fleet, links, self._wires)
            self._find(fleet, usd, self._usd)
            raise

    def _find(self, fleet: Fleet, every: Mapping[Ends, object], stated: _Stated[_Value]) -> None:
        """Raise the error of the first link that does not go with those before it."""
        so_far: dict[Ends, Wire] = {}
        at = {**{ends: place for ends, (_, place) in stated.of_levels.items()}, **stated.at}
        for ends in sorted(every, key=lambda ends: self._line(at[ends]) or 0):
            so_far[ends] = Wire(bandwidth_bytes_per_s=1.0, latency_s=0.0)
            try:
                replace(fleet, links=so_far)
            except ClusterError as error:
                raise self._error(str(error), at[ends]) from None
