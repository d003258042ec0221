"""What it costs that activations of blocks wait in the memory of the host.

Copies to the host and back run one after the other beside the passes, each behind what is computed when it is asked for
(`runtime.stages.hosted`): a block's activations leave while what is behind it runs forward, and must be gone when the next such block is
over; in the backward those of the block before come while a block's are used. A pass takes longer by what it waits for them. Where all of
a micro-batch begins to come ahead of its backward (RELOAD), that waits only until so much of it is there that the rest comes in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from heterodyne.cost.stage import StageCosts

__all__ = ["Part", "exposed_s", "lead_s", "leaving_s", "on_host"]

_AT_A_TIME = 3  # one whose copy is not over yet, one in use, one that comes


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of a pass, in order: a block on the host, or what lies between such (``copied_s`` and ``bytes`` are 0).

    Args:
        forward_s, backward_s: of what is computed. copied_s: of its activations to the host, or back. bytes: of them.
    """

    forward_s: float
    backward_s: float
    copied_s: float = 0.0
    bytes: int = 0


def exposed_s(parts: Sequence[Part]) -> tuple[float, float]:
    """What a forward and a backward wait for copies."""
    return _forward_s(parts)[0] - sum(p.forward_s for p in parts), _backward_s(parts) - sum(p.backward_s for p in parts)


def leaving_s(parts: Sequence[Part]) -> float:
    """What copies still take when the forward is over."""
    over, copied = _forward_s(parts)
    return max(0.0, copied - over)


def lead_s(parts: Sequence[Part]) -> float:
    """Of the copies back, one behind the other, those that must be over when the backward begins, or it would wait for one."""
    computed = copied = most = 0.0
    for part in reversed(parts):
        if part.bytes:
            copied += part.copied_s
            most = max(most, copied - computed)
        computed += part.backward_s
    return most


def _forward_s(parts: Sequence[Part]) -> tuple[float, float]:
    """When it is over, and when the last copy is."""
    now = link = leaving = 0.0
    for part in parts:
        now += part.forward_s
        if part.bytes:
            link = max(link, now) + part.copied_s
            now, leaving = max(now, leaving), link
    return now, link


def _backward_s(parts: Sequence[Part]) -> float:
    """The first is asked for when the backward begins."""
    away = [part for part in reversed(parts) if part.bytes]
    now, asked = 0.0, 0
    link, come = 0.0, dict[int, float]()
    if away:
        link = come[0] = away[0].copied_s
    for part in reversed(parts):
        if part.bytes:
            if asked + 1 < len(away):
                link = max(link, now) + away[asked + 1].copied_s
                come[asked + 1] = link
            now = max(now, come[asked])
            asked += 1
        now += part.backward_s
    return now


def on_host(
    costs: StageCosts, sizes: Sequence[int], parts_of: Callable[[int], Sequence[Part]], lost: Callable[[float], int]
) -> tuple[StageCosts, int]:
    """The stage with those parts on the host, and the bytes of those that are on the device at a time.

    Args:
        parts_of: for each size of a micro-batch. lost: what the allocator loses beside so many bytes.
    """
    parts = {size: parts_of(size) if size else () for size in set(sizes)}
    exposed = {size: exposed_s(parts[size]) for size in parts}
    away = [sum(part.bytes for part in parts[size]) for size in sizes]
    most = max((sum(sorted(part.bytes for part in of)[-_AT_A_TIME:]) for of in parts.values()), default=0)

    def later(seconds: Sequence[float], which: int) -> tuple[float, ...]:
        return tuple(s + exposed[size][which] for s, size in zip(seconds, sizes, strict=False))

    made = replace(
        costs,
        forward_s=later(costs.forward_s, 0),
        backward_s=later(costs.backward_s, 1),
        input_s=later(costs.input_s, 1),
        halved_forward_s=later(costs.halved_forward_s, 0),
        kept_bytes=tuple(max(0, k - a - lost(a)) for k, a in zip(costs.kept_bytes, away, strict=True)),
        reloaded_bytes=tuple(a + lost(a) for a in away),
        leaving_s=tuple(leaving_s(parts[size]) for size in sizes),
        fetch_s=tuple(exposed[size][1] for size in sizes),
        reload_s=tuple(sum(part.copied_s for part in parts[size]) for size in sizes),
        lead_s=tuple(lead_s(parts[size]) for size in sizes),
        host_bytes=tuple(away),
    )
    return made, most + lost(most)
