"""What if the fleet were another one: more devices, some less, other links. In the words of a command line.

add       8xH100-SXM-80GB          a node of 8 devices more; it stands and is joined like the pool of that kind that is there
          4x8xH100-SXM-80GB        four such nodes
          8xH100-SXM-80GB@east/a   in that place
without   node7                    a pool, a place with all in it, or one node of a pool by its name
          2xnode7                  two nodes of that pool
links     inter=100Gb/s            every link between nodes; with another latency: inter=100Gb/s,5us
          intra=300GB/s            the link inside every node
          east/a=100Gb/s           what stands in a place or pool among itself
          east/a:west=1Gb/s,40ms   between two of them
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from heterodyne.cluster.catalog import Accelerator, catalog, find
from heterodyne.cluster.file_values import CATALOG_LINK_LATENCY_S
from heterodyne.cluster.fleet import EVERYWHERE, Fleet, Pool, Wire, listed
from heterodyne.errors import ClusterError, UnitError
from heterodyne.units import parse_bandwidth, parse_seconds

__all__ = ["changed"]

_Value = TypeVar("_Value")
_ADD = re.compile(r"^(?:(?P<nodes>[0-9]+)x)?(?P<devices>[0-9]+)x(?P<kind>[^@]+?)(?:@(?P<place>.+))?$")
_WITHOUT = re.compile(r"^(?:(?P<nodes>[0-9]+)x)?(?P<name>.+)$")


def changed(fleet: Fleet, *, add: Iterable[str] = (), without: Iterable[str] = (), links: Iterable[str] = ()) -> Fleet:
    """The fleet with these changes: first what is gone, then what is new, then the links.

    Nodes of a pool are alike, so one that is gone leaves the pool with one less, whichever it was.

    Raises ClusterError for a change that cannot be read, names what is not there, leaves nothing, or leaves an added node unjoined.
    """
    for text in without:
        fleet = _without(fleet, text)
    before = {pool.name for pool in fleet.pools}
    for text in add:
        fleet = _with(fleet, text)
    for text in links:
        fleet = _linked(fleet, text)
    for pool in fleet.pools:
        others = [other for other in fleet.pools if other.name != pool.name]
        if pool.name not in before and others and all(fleet.wire(pool, other) is None for other in others):
            raise ClusterError(
                f"nothing says what joins the added {pool.name} and the rest; say where it stands, as in "
                f"'{pool.devices_per_node}x{pool.kind}@{_outermost(others[0])}', or give the link: '{pool.name}:{EVERYWHERE}=100Gb/s,10us'"
            )
    return fleet


def _without(fleet: Fleet, text: str) -> Fleet:
    """The fleet without a pool, a place, or some nodes of a pool."""
    held = {word: _named(fleet, word) for word in _names(fleet)}
    name, number = text, None
    if name not in held:
        counted, single = _WITHOUT.match(text), _single(fleet, text)
        if single is not None:
            name, number = single.node_name, 1
        elif counted is not None and counted["nodes"] and counted["name"] in held:
            name, number = counted["name"], int(counted["nodes"])
    if name not in held:
        wanted = (_WITHOUT.match(text) or {"name": text})["name"]
        raise ClusterError(f"there is no pool {wanted}; there are {listed(held)}")
    gone = held[name]
    if number is None:
        number = max(pool.nodes for pool in gone)
    elif len({pool.node_name for pool in gone}) > 1:
        raise ClusterError(f"{name} is {len(gone)} pools ({listed(p.name for p in gone)}); say of which of them")
    elif number > gone[0].nodes or number < 1:
        raise ClusterError(f"{name} has {gone[0].nodes} nodes, so {number} cannot be taken away")
    names = {pool.name for pool in gone}
    left = [_smaller(pool, number) if pool.name in names else pool for pool in fleet.pools]
    pools = tuple(pool for pool in left if pool is not None)
    if not pools:
        raise ClusterError(f"without {text} nothing is left of fleet {fleet.name!r}")
    there = {EVERYWHERE, *(word for pool in pools for word in (pool.name, *pool.places))}
    return replace(fleet, pools=pools, links=_among(fleet.links, there), usd_per_byte=_among(fleet.usd_per_byte, there))


def _named(fleet: Fleet, word: str) -> list[Pool]:
    """The pools of that name, or in nodes of that name; else those in that place."""
    own = [pool for pool in fleet.pools if word in (pool.name, pool.node_name)]
    return own or [pool for pool in fleet.pools if word in pool.places]


def _smaller(pool: Pool, nodes: int) -> Pool | None:
    left = pool.nodes - nodes
    if left < 1:
        return None
    return replace(pool, nodes=left, between=pool.between if left > 1 else None)


def _single(fleet: Fleet, text: str) -> Pool | None:
    """The pool of which a name like ``new-3`` is one node, if it stands there alone."""
    base, _, number = text.rpartition("-")
    found = [p for p in fleet.pools if p.node_name == base.replace("/", ".") and p.numbered]
    inside = bool(found) and number.isdecimal() and int(number) < found[0].nodes
    return found[0] if inside else None


def _with(fleet: Fleet, text: str) -> Fleet:
    match = _ADD.match(text.strip())
    if match is None:
        raise ClusterError(
            f"{text!r} adds nothing; write DEVICESxKIND, NODESxDEVICESxKIND or either @PLACE, as in '8xA100-SXM-80GB'"
        )
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    if not 1 <= nodes <= 100_000 or not 1 <= devices <= 1024:
        raise ClusterError(f"{text!r} adds {nodes} nodes of {devices} devices; give 1 to 100000 nodes of 1 to 1024")
    accelerator = _kind(fleet, match["kind"].strip())
    alike = [pool for pool in fleet.pools if pool.kind == accelerator.kind]
    place = _place(fleet, match["place"], alike)
    near = [pool for pool in alike if pool.place == place] or alike
    like = near[0] if near else None
    memory = like.memory_bytes if like else accelerator.memory_bytes
    if memory is None:
        raise ClusterError(
            f"the catalog does not state the memory of {accelerator.kind}; add it to the fleet file, with its 'memory'"
        )
    name = _free(accelerator.kind, {*_names(fleet), *(pool.node_name for pool in fleet.pools)})
    pool = Pool(
        name=name,
        kind=accelerator.kind,
        nodes=nodes,
        devices_per_node=devices,
        memory_bytes=memory,
        inside=_inside(accelerator, devices, like),
        place=place,
        backend=like.backend if like else accelerator.backend,
        usd_per_device_hour=like.usd_per_device_hour if like else None,
        spot=like.spot if like else False,
        watts_per_device=like.watts_per_device if like else accelerator.tdp_w,
        numbered=nodes > 1,
    )
    grown = replace(fleet, pools=(*fleet.pools, pool))
    between = like.between if like and like.place == place else None
    joined = replace(pool, between=grown.wire(pool, pool) or between) if nodes > 1 else pool
    return replace(fleet, pools=(*fleet.pools, joined))


def _inside(accelerator: Accelerator, devices: int, like: Pool | None) -> Wire | None:
    if like is not None and like.inside is not None:
        return like.inside
    if devices == 1 or accelerator.link_bandwidth_bytes_per_s is None:
        return None
    return Wire(bandwidth_bytes_per_s=accelerator.link_bandwidth_bytes_per_s, latency_s=CATALOG_LINK_LATENCY_S)


def _kind(fleet: Fleet, text: str) -> Accelerator:
    """The one kind of that name, or whose name begins like that; of several the one that the fleet has."""
    exact = fleet.accelerators.get(text) or find(text)
    if exact is not None:
        return fleet.accelerators.get(exact.kind, exact)
    known = {**catalog(), **fleet.accelerators}
    wanted = text.lower().replace(" ", "-")
    close = [kind for kind in known if kind.lower().startswith(wanted)]
    close = close or [kind for kind in known if f"-{wanted}" in kind.lower()]
    here = [kind for kind in close if kind in fleet.kinds]
    for only in (close, here):
        if len(only) == 1:
            return known[only[0]]
    if close:
        raise ClusterError(f"{text!r} can be {listed(here or close)}; say which")
    raise ClusterError(
        f"there is no accelerator {text!r}; the fleet has {listed(fleet.kinds)}, and heterodyne kinds lists what the catalog knows"
    )


def _place(fleet: Fleet, text: str | None, alike: list[Pool]) -> tuple[str, ...]:
    """The place that is named; else that of the alike pools; else what is around all that there is."""
    if text is not None:
        if text in fleet.places:
            return tuple(text.split("/"))
        named = [pool for pool in fleet.pools if pool.name == text]
        if not named:
            raise ClusterError(f"there is no place {text}; there are {listed(fleet.places)}")
        return named[0].place
    if alike:
        return alike[0].place
    common = fleet.pools[0].place
    for pool in fleet.pools[1:]:
        while common != pool.place[: len(common)]:
            common = common[:-1]
    return common


def _linked(fleet: Fleet, text: str) -> Fleet:
    ends, equals, value = text.partition("=")
    if not equals:
        raise ClusterError(
            f"{text!r} is no link; write 'inter=100Gb/s', 'intra=300GB/s', 'east=50Gb/s' or 'east:west=1Gb/s,40ms'"
        )
    bandwidth, latency = _value(text, value)
    ends = ends.strip()
    if ends == "intra":
        sizes: Counter[str] = Counter()
        for pool in fleet.pools:
            sizes[pool.node_name] += pool.devices_per_node
        return replace(
            fleet,
            pools=tuple(
                replace(p, inside=_wire(p.inside, bandwidth, latency, text)) if sizes[p.node_name] > 1 else p
                for p in fleet.pools
            ),
        )
    if ends == "inter":
        between = {k: _wire(wire, bandwidth, latency, text) for k, wire in fleet.links.items()}
        if not between and all(pool.between is None for pool in fleet.pools):
            between = {(EVERYWHERE, EVERYWHERE): _wire(None, bandwidth, latency, text)}
        pools = (replace(p, between=p.between and _wire(p.between, bandwidth, latency, text)) for p in fleet.pools)
        return replace(fleet, pools=tuple(pools), links=between)
    a, colon, b = ends.partition(":")
    known = {EVERYWHERE, *fleet.places, *(pool.name for pool in fleet.pools)}
    for end in (a, b) if colon else (a,):
        if end not in known:
            raise ClusterError(f"there is no pool or place {end}; there are inter, intra, {listed(sorted(known))}")
    return _joined(fleet, a, b if colon else a, bandwidth, latency, text)


def _joined(fleet: Fleet, a: str, b: str, bandwidth: float, latency: float | None, text: str) -> Fleet:
    """With one link more, or another one. ``a`` and ``all``: with each pool outside of a."""
    pairs = [(a, b)]
    if a != b and EVERYWHERE in (a, b):
        alone = a if b == EVERYWHERE else b
        pairs = [(alone, pool.name) for pool in fleet.pools if alone not in (pool.name, *pool.places)]
    links = dict(fleet.links)
    for ends in pairs:
        turned = (ends[1], ends[0])
        left, right = (_held(fleet, end) for end in ends)
        met = (fleet.wire(p, q) for p in left for q in right if p.name != q.name or p.nodes > 1)
        known = (links.pop(ends, None), links.pop(turned, None), next(met, None))
        links[ends] = _wire(next((wire for wire in known if wire is not None), None), bandwidth, latency, text)
    bare = replace(fleet, pools=tuple(replace(pool, between=None) for pool in fleet.pools))
    grown = replace(bare, links=links)
    return replace(grown, pools=tuple(_rederived(pool, bare, grown, a) for pool in fleet.pools))


def _rederived(pool: Pool, before: Fleet, after: Fleet, end: str) -> Pool:
    """The pool, with the link that has changed between its nodes if it is of that very pool or place, or was the pool's before."""
    alone = before.pool(pool.name)
    old, new = before.wire(alone, alone), after.wire(alone, alone)
    own = pool.between is not None and pool.between != old and end not in (pool.name, "/".join(pool.place))
    return pool if pool.nodes == 1 or old == new or own else replace(pool, between=new)


def _held(fleet: Fleet, end: str) -> list[Pool]:
    return [pool for pool in fleet.pools if end == EVERYWHERE or end in (pool.name, *pool.places)]


def _wire(old: Wire | None, bandwidth: float, latency: float | None, text: str) -> Wire:
    if latency is None and old is None:
        raise ClusterError(f"{text!r} needs a latency, as nothing is known of that link: '{text},10us'")
    kept = old.latency_s if old is not None else 0.0
    return Wire(bandwidth_bytes_per_s=bandwidth, latency_s=kept if latency is None else latency)


def _value(text: str, value: str) -> tuple[float, float | None]:
    bandwidth, comma, latency = value.partition(",")
    try:
        return parse_bandwidth(bandwidth.strip()), parse_seconds(latency.strip()) if comma else None
    except UnitError as error:
        raise ClusterError(f"{text!r}: {error}") from error


def _names(fleet: Fleet) -> list[str]:
    """Return what can be named: pools, their nodes where these hold several pools, and places."""
    return list(dict.fromkeys((*(p.name for p in fleet.pools), *fleet.places, *(p.node_name for p in fleet.pools))))


def _outermost(pool: Pool) -> str:
    return pool.place[0] if pool.place else pool.name


def _among(stated: Mapping[tuple[str, str], _Value], there: set[str]) -> dict[tuple[str, str], _Value]:
    return {ends: value for ends, value in stated.items() if there.issuperset(ends)}


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
