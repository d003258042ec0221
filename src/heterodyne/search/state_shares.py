"""The size of each shard of state: as equal as memory allows, and larger behind slow links.

To reduce-scatter and all-gather N bytes of which a device keeps s, it sends N - s over its link, in (N - s) / B seconds. So the step is
shortest where no device sends for longer than T, the least for which shards between N - T B and the free memory can sum to N. Shards in
proportion to memory would be wrong: what a large device spares a small one in memory, the small one sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from heterodyne.cost.model import CostModel

__all__ = ["PARTS", "as_shares", "least_time_shards", "link_bytes_per_s"]

PARTS = 1000
"""Shares are told in so many parts: what rounding moves is less than a plan file needs."""
_HALVINGS = 100


def least_time_shards(total: float, room: Sequence[float], bytes_per_s: Sequence[float]) -> tuple[float, ...] | None:
    """The bytes of ``total`` that each device keeps; None if they have no memory for it.

    ``room``: the most that each can keep; ``bytes_per_s``: of its link. Of solutions with the same time, the most equal shards.
    """
    if any(most < 0 for most in room) or sum(room) < total:
        return None
    if total <= 0:
        return (0.0,) * len(room)

    def least(seconds: float) -> list[float]:
        return [max(0.0, total - seconds * rate) for rate in bytes_per_s]

    def enough(seconds: float) -> bool:
        lows = least(seconds)
        return sum(lows) <= total and all(low <= most for low, most in zip(lows, room, strict=True))

    lows = least(_first(enough, total / min(bytes_per_s)))
    level = _first(lambda at: sum(_between(lows, at, room)) >= total, total)
    return _between(lows, level, room)


def as_shares(owners: Sequence[str], kept: Sequence[float]) -> dict[str, int]:
    """The shares of devices that keep so many bytes each."""
    return {device: round(PARTS * own / sum(kept)) for device, own in zip(owners, kept, strict=True)}


def link_bytes_per_s(model: CostModel, device: str, owners: Iterable[str]) -> float:
    """Of the best link of a device to another owner: in a ring it has two neighbours."""
    links = [model.collectives.send(device, other).s_per_byte for other in owners if other != device]
    return 1 / max(min(links), 1e-15)


def _between(lows: Sequence[float], level: float, highs: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(low, min(level, high)) for low, high in zip(lows, highs, strict=True))


def _first(holds: Callable[[float], bool], high: float) -> float:
    """The least value at which what holds at ``high`` and above it does."""
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
