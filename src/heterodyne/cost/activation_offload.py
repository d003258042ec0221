"""The cost of activations that are offloaded to host memory.

Copies to the host and back run one after the other and overlap with computing (`runtime.stages.hosted`): the activations of a block
leave while the blocks behind it run forward, and must be gone when the next offloaded block is done; in the backward those of the block
before are fetched while a block runs. The exposed part of the copies adds to the pass. Where fetching starts ahead of the backward
(RELOAD), the backward waits only until enough is there that the rest comes in time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from heterodyne.cost.stage import StageCosts

__all__ = ["Part", "exposed_s", "lead_s", "leaving_s", "on_host"]

_AT_A_TIME = 3  # one whose copy is not over yet, one in use, one that comes


@dataclass(frozen=True, kw_only=True)
class Part:
    """In order of a pass: an offloaded block, or the ops between such (``copied_s`` and ``bytes`` are 0).

    Args:
        forward_s, backward_s: of computing. copied_s: of its activations to the host, or back. bytes: of them.
    """

    forward_s: float
    backward_s: float
    copied_s: float = 0.0
    bytes: int = 0


def exposed_s(parts: Sequence[Part]) -> tuple[float, float]:
    """Seconds that a forward and a backward wait for copies."""
    return _forward_s(parts)[0] - sum(p.forward_s for p in parts), _backward_s(parts) - sum(p.backward_s for p in parts)


def leaving_s(parts: Sequence[Part]) -> float:
    """Seconds of copies that go on after the forward."""
    over, copied = _forward_s(parts)
    return max(0.0, copied - over)


def lead_s(parts: Sequence[Part]) -> float:
    """Seconds of the copies back that must be done before the backward begins, so that it waits for none."""
    computed = copied = most = 0.0
    for part in reversed(parts):
        if part.bytes:
            copied += part.copied_s
            most = max(most, copied - computed)
        computed += part.backward_s
    return most


def _forward_s(parts: Sequence[Part]) -> tuple[float, float]:
    """The end of computing, and the end of the last copy."""
    now = link = leaving = 0.0
    for part in parts:
        now += part.forward_s
        if part.bytes:
            link = max(link, now) + part.copied_s
            now, leaving = max(now, leaving), link
    return now, link


def _backward_s(parts: Sequence[Part]) -> float:
    """Fetching begins when the backward begins."""
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
    """The stage with those parts offloaded, and the peak bytes of offloaded activations on the device.

    Args:
        parts_of: for each micro-batch size. lost: allocator loss beside so many bytes.
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
