"""Ways to train one model at several sites that slow links join: seconds of a step, bytes between the sites, and money.

Either one plan spans the sites, or each site has the whole model, a share of every global batch by its speed, and the fastest plan of its
own devices; then what a site sends is as large as the model, whatever its plan. With numbers of b bits, N parameters and links of
bandwidth B between a site and the one that keeps the totals, an exchange takes

    T = 2 (N b / 8 / B + latency)          there and back, the others one after the other

where connections stay open, as those of an all-reduce. One plan over all sites also agrees twice in each step, on what the loss is
averaged over and, where a pipeline spans the sites, on the norm of the gradients: two messages one after the other, of a latency each,
or of a round trip R between processors, where gloo announces what it sends. What a pipeline sends in a step, S bytes, begins with a
window of W = 10 segments that doubles with each round trip, until it fills the link, since its connections have rested since the last
step (slow start: RFC 5681, 4.1; Cardwell, Savage and Anderson, "Modeling TCP latency", INFOCOM 2000). Sites that send messages of 16 or
8 bits, or meet seldom, make a connection for each message: it begins so too, and TCP and the proof of the secret take three round trips:

    T = 2 (S / B + latency + R log2(min(S, B R) / W)) + 3 R

and each step waits for T, or, where sites meet after H steps, each round of H steps waits for what a delay of d of them does not hide:
max(0, T - d step). Traffic of replicas that meet in each step may overlap with their backward, which is not counted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil, inf, log2

from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cost.layers import least_bytes
from heterodyne.errors import ClusterError, InfeasibleError
from heterodyne.graph.sharding.dealing import dealt_to_all
from heterodyne.search.fleet.evaluator import Watch
from heterodyne.search.fleet.plan import Candidate
from heterodyne.search.fleet.planner import FleetPlanner
from heterodyne.search.fleet.predict import Predictor
from heterodyne.search.fleet.space import Space
from heterodyne.units import counted

__all__ = ["Outer", "Way", "sites_of", "ways_over_sites"]

_BITS = (32, 16, 8)
_PARTS = 1_000_000  # in which weights of sites are told apart
_FIRST_WINDOW = 10 * 1460  # bytes that a TCP connection begins with (RFC 6928)
_ROUNDS = 3  # of shares by the speeds that the last ones gave
_BYTES_OF_PARAMETER = 4
_OVER_LINK = "a pipeline over the link"
_MEMORY = tuple(2.0**-halvings for halvings in range(1, 9))
"""Fractions of the memory that are tried, one after the other."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """How sites meet seldom: after ``every`` of their steps, with numbers of ``bits``, while ``delay`` steps go on (None: as many as hide
    the exchange, if there are so many)."""

    every: int = 100
    bits: int = 8
    delay: int | None = None


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way over the sites.

    Args:
        exact: whether the result is that of one device.
        step_s: seconds of a global batch; where sites meet seldom, on average.
        bytes_per_step: between sites, in all directions together, on average.
        usd: of a step, devices and traffic; None where a price is not known.
        shares: samples of each global batch by site; none where one plan spans them.
        outer: how sites meet, where each trains by itself; None where all devices do each step together.
        note: why there is no such way; then all numbers are infinite.
    """

    name: str
    exact: bool
    step_s: float
    bytes_per_step: float = 0.0
    usd: float | None = None
    shares: Mapping[str, int]
    outer: Outer | None = None
    note: str = ""

    @property
    def bytes_per_day(self) -> float:
        return self.bytes_per_step * 86_400 / self.step_s


def sites_of(fleet: Fleet) -> dict[str, tuple[Pool, ...]]:
    """Return the pools of each site, which are the outermost places of the fleet.

    Raises ClusterError where there are not several, or nothing says what joins two of them.
    """
    sites: dict[str, list[Pool]] = {}
    for pool in fleet.pools:
        sites.setdefault(pool.place[0] if pool.place else pool.name, []).append(pool)
    if len(sites) < 2:
        raise ClusterError(
            f"fleet {fleet.name!r} is one site, {next(iter(sites))}: give its sites as regions or zones, and the links between them"
        )
    for a, b in combinations(sites, 2):
        _link(fleet, sites[a], sites[b], (a, b))
    return {name: tuple(pools) for name, pools in sites.items()}


def ways_over_sites(
    planner: FleetPlanner, space: Space, outer: Outer, *, watch: Watch | None = None
) -> tuple[Way, ...]:
    """Return the ways, the fastest first. Raises ClusterError for a fleet that is not of several sites."""
    sites = sites_of(planner.fleet)
    apart = _by_site(planner, space, sites, outer, watch)
    known = {way.name for way in apart if not way.note}  # so that replicas of all bits are counted alike
    together = (way for way in _one_plan(planner, space, sites, watch) if way.name not in known)
    return tuple(sorted([*together, *apart], key=lambda way: way.step_s))


def _one_plan(
    planner: FleetPlanner, space: Space, sites: Mapping[str, Sequence[Pool]], watch: Watch | None
) -> list[Way]:
    """The fastest plans of all devices: of pipelines over the link, of replicas, of some of the sites alone.

    Where no pipeline over the link is among what a search evaluates, since others are faster, it is searched with so little memory that no
    site holds the model.
    """
    found: dict[str, Candidate] = {}
    why = ""
    for each, memory in ((space, 1.0), (replace(space, max_pipelines=1), 1.0), *((space, part) for part in _MEMORY)):
        if memory < 1 and _OVER_LINK in found:
            break
        search = planner.search(each, watch=watch, memory=memory)
        best = search.run()
        if best is None:
            if memory < 1:
                break  # nor does it fit with less
            why = "it does not fit"
            continue
        for candidate in (best, *search.pool.ranked):
            name = _kind(candidate, sites)
            if memory < 1 and name != _OVER_LINK:
                continue
            if name not in found or candidate.predicted.step_s < found[name].predicted.step_s:
                found[name] = candidate
    ways = [_as_way(planner, sites, name, own) for name, own in found.items()]
    if _OVER_LINK in found:
        return ways
    note = why or "none of the plans that were tried is one"
    return [*ways, Way(name=_OVER_LINK, exact=True, step_s=inf, shares={}, note=note)]


def _as_way(planner: FleetPlanner, sites: Mapping[str, Sequence[Pool]], name: str, found: Candidate) -> Way:
    """One plan as a way, with the round trips between its sites that its prediction does not count."""
    used = [pools for pools in sites.values() if any(pool.name in found.plan.devices for pool in pools)]
    wires = [wire for a, b in combinations(used, 2) if (wire := _slowest(planner.fleet, a, b)) is not None]
    crossing = _bytes_between(planner, sites, found)
    waits_s = max((_agreement_s(planner.fleet, wire) for wire in wires), default=0.0)
    if name.endswith(_OVER_LINK):
        waits_s = max(2 * _agreement_s(planner.fleet, wire) + _slow_start_s(wire, crossing / 2) for wire in wires)
    predicted = found.predicted
    usd = None if predicted.usd is None else predicted.usd + (predicted.usd_per_hour or 0.0) * waits_s / 3600
    return Way(name=name, exact=True, step_s=predicted.step_s + waits_s, bytes_per_step=crossing, usd=usd, shares={})


def _kind(found: Candidate, sites: Mapping[str, Sequence[Pool]]) -> str:
    """What a plan is, as far as sites go."""
    used = [name for name in sites if name in {_site(sites, pool) for pool in found.plan.devices}]
    spans = any(len({_site(sites, home.pool) for home in group.template.homes}) > 1 for group in found.plan.groups)
    if len(used) == 1:
        return f"{used[0]} alone"
    how = _OVER_LINK if spans else _replicas(_BITS[0])
    return how if len(used) == len(sites) else f"{' and '.join(used)}: {how}"


def _replicas(bits: int) -> str:
    return f"replicas, sums in {bits} bits"


def _by_site(
    planner: FleetPlanner, space: Space, sites: Mapping[str, Sequence[Pool]], outer: Outer, watch: Watch | None
) -> list[Way]:
    """Each site with the whole model."""
    try:
        shares, found = _shared(planner, space, sites, watch)
    except InfeasibleError as error:
        names = (*map(_replicas, _BITS), _apart(outer))
        return [
            Way(name=name, exact=name == _replicas(_BITS[0]), step_s=inf, shares={}, note=str(error)) for name in names
        ]
    step_s = max(own.predicted.step_s for own in found.values())

    def exchange_s(how: Outer) -> float:
        together = (how.every, how.bits) == (1, _BITS[0])  # one plan, whose connections are open
        return _exchange_s(planner, sites, how.bits, together=together)

    size = _parameters(planner) / 8  # in bytes, for each bit of a number
    keeper, *others = sites
    usd_per_byte = sum(_usd_per_byte(planner.fleet, sites[keeper], sites[name]) for name in others)
    hourly = [own.predicted.usd_per_hour for own in found.values()]
    each_step = [(_replicas(bits), Outer(every=1, bits=bits, delay=0)) for bits in _BITS]
    made = []
    for name, how in (*each_step, (_apart(outer), _hiding(outer, exchange_s(outer) / step_s))):
        exposed_s = max(0.0, exchange_s(how) - (how.delay or 0) * step_s)
        seconds = step_s + exposed_s / how.every
        one_way = size * how.bits / how.every
        priced = None if None in hourly else sum(h or 0.0 for h in hourly) * seconds / 3600
        exact = how.every == 1 and how.bits == _BITS[0]
        made.append(
            Way(
                name=name,
                exact=exact,
                step_s=seconds,
                bytes_per_step=2 * len(others) * one_way,
                usd=None if priced is None else priced + 2 * one_way * usd_per_byte,
                shares=shares,
                outer=None if exact else how,
            )
        )
    return made


def _apart(outer: Outer) -> str:
    return f"apart, meeting every {outer.every} steps"


def _hiding(outer: Outer, steps: float) -> Outer:
    """With a delay that hides an exchange of so many steps, as far as there are so many before the next."""
    return replace(outer, delay=min(outer.every - 1, ceil(steps))) if outer.delay is None else outer


def _shared(
    planner: FleetPlanner, space: Space, sites: Mapping[str, Sequence[Pool]], watch: Watch | None
) -> tuple[dict[str, int], dict[str, Candidate]]:
    """Return the samples of each site, so that all take about as long, and the fastest plans for these. Raises InfeasibleError."""
    whole = planner.global_batch
    weights = {name: float(sum(pool.devices for pool in pools)) for name, pools in sites.items()}
    best: tuple[float, dict[str, int], dict[str, Candidate]] | None = None
    for _ in range(_ROUNDS):
        counts = dealt_to_all(whole, [round(_PARTS * weight / sum(weights.values())) for weight in weights.values()])
        if not all(counts):
            raise InfeasibleError(f"{counted(whole, 'sample')} a step for {len(sites)} sites")
        shares = dict(zip(sites, counts, strict=True))
        found = {name: _alone(planner, space, pools, shares[name], watch) for name, pools in sites.items()}
        longest = max(own.predicted.step_s for own in found.values())
        if best is None or longest < best[0]:
            best = longest, shares, found
        weights = {name: shares[name] / own.predicted.step_s for name, own in found.items()}
    assert best is not None
    return best[1], best[2]


def _alone(planner: FleetPlanner, space: Space, pools: Sequence[Pool], samples: int, watch: Watch | None) -> Candidate:
    """The fastest plan of one site for its share."""
    names = tuple(pool.name for pool in pools)
    return replace(planner, global_batch=samples).plan(space=replace(space, pools=names), watch=watch).best


def _exchange_s(planner: FleetPlanner, sites: Mapping[str, Sequence[Pool]], bits: int, *, together: bool) -> float:
    """Seconds until every site has what came of all parameters: sent to the first site, and back. Its link is shared by the others.

    ``together``: in a step of all sites, over connections that are open; else over a new one each.
    """
    keeper, *others = sites
    wires = [_link(planner.fleet, sites[keeper], sites[name], (keeper, name)) for name in others]
    size = _parameters(planner) * bits / 8
    carried_s = sum(size / wire.bandwidth_bytes_per_s for wire in wires)
    return 2 * carried_s + max(
        2 * wire.latency_s
        + (_agreement_s(planner.fleet, wire) if together else 6 * wire.latency_s + 2 * _slow_start_s(wire, size))
        for wire in wires
    )


def _agreement_s(fleet: Fleet, wire: Wire) -> float:
    """Seconds in which all devices agree on a number over a link: two messages, which processors announce."""
    announced = any(pool.backend == "cpu" for pool in fleet.pools)
    return (4 if announced else 2) * wire.latency_s


def _slow_start_s(wire: Wire, size: float) -> float:
    """Seconds in which a message over a connection that is new, or has rested, fills less than the link."""
    round_trip_s = 2 * wire.latency_s
    window = min(size, wire.bandwidth_bytes_per_s * round_trip_s)
    return round_trip_s * log2(max(1.0, window / _FIRST_WINDOW))


def _parameters(planner: FleetPlanner) -> float:
    """Return how many parameters the model has, by their bytes in fp32."""
    return least_bytes(planner.costs, planner.fleet.kinds[0]) / 2 / _BYTES_OF_PARAMETER


def _bytes_between(planner: FleetPlanner, sites: Mapping[str, Sequence[Pool]], found: Candidate) -> float:
    """Return the bytes that a step sends between sites: its price, where a byte between them costs 1 and all else nothing."""
    pairs = [(a, b) for one, other in combinations(sites.values(), 2) for a in one for b in other]
    fleet = planner.fleet
    inside = [(a.name, b.name) for pools in sites.values() for a, b in combinations(pools, 2)]
    priced = {(a.name, b.name): 1.0 for a, b in pairs} | dict.fromkeys(inside, 0.0)
    predictor = Predictor(
        fleet=replace(fleet, usd_per_byte=priced),
        tables=planner.tables,
        global_batch=planner.global_batch,
        software=planner.software,
    )
    return predictor.traffic_usd(found.plan)


def _usd_per_byte(fleet: Fleet, one: Sequence[Pool], other: Sequence[Pool]) -> float:
    return max(fleet.traffic_usd_per_byte(a, b) for a in one for b in other)


def _link(fleet: Fleet, one: Sequence[Pool], other: Sequence[Pool], names: tuple[str, str]) -> Wire:
    """The slowest that joins them. Raises ClusterError if nothing says what does."""
    found = _slowest(fleet, one, other)
    if found is None:
        raise ClusterError(
            f"nothing says what joins the sites {names[0]} and {names[1]}; add to links: "
            f"{{between: [{names[0]}, {names[1]}], bandwidth: 1 Gb/s, latency: 40 ms}}"
        )
    return found


def _slowest(fleet: Fleet, one: Sequence[Pool], other: Sequence[Pool]) -> Wire | None:
    found = [wire for a in one for b in other if (wire := fleet.wire(a, b)) is not None]
    return min(found, key=lambda wire: wire.bandwidth_bytes_per_s, default=None)


def _site(sites: Mapping[str, Sequence[Pool]], pool: str) -> str:
    return next(name for name, pools in sites.items() if any(pool == own.name for own in pools))
