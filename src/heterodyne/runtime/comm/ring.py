"""Reduce-scatter and all-gather of unequal ranges among processes, as a ring of chunks.

A range of a flat tensor goes round the ring, from the rank behind its owner to its owner where it is added up, or from its owner on where
it is handed out. So rank r sends all but its own range, or all but that of the rank behind it: N - s bytes, whatever the shares are. A ring
that moves whole ranges in lockstep takes as many turns as there are ranks, each as long as the largest range. Here ranges are cut into
chunks that follow each other, so that every link is busy all the time and the largest range costs no more than its bytes (the bound is
max over ranks of (N - s) / bandwidth).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from heterodyne.graph.sharding.price import LATENCY_BYTES

__all__ = ["all_gather_ring", "chunk_elements", "reduce_scatter_ring"]

_LEAD = (
    2  # chunks that a rank sends of its own ahead of those that it passes on: one is on its way, one is being added up
)
_AHEAD = 4  # receives that are posted before they are waited for
_FIRST_TAG = 2**20  # others of the group have smaller ones

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class _Chunk:
    """``turn``: when it comes to this rank, where a range takes from 0 to 1; ``hop``: how many ranks have sent it before."""

    turn: float
    hop: int
    tag: int
    start: int
    stop: int


def chunk_elements(elements: int, ranks: int, element_bytes: int) -> int:
    """Of how many elements a chunk is.

    Chunks of c bytes take N/c messages, and the last of them W - 1 hops that begin two chunks after each other: N/c latencies and
    2 (W - 1) c bytes, least for c = sqrt(N L / (2 W - 2)) where L bytes could be sent in one latency.
    """
    size = sqrt(elements * element_bytes * LATENCY_BYTES / (_LEAD * (ranks - 1)))
    return max(1, round(size / element_bytes))


def _chunks(ranges: Sequence[Range], place: int, first_hop: Literal[0, 1], size: int) -> list[_Chunk]:
    """Every chunk as it comes to the rank at ``place``, in an order in which each is behind what the ranks before have to do for it.

    ``first_hop``: how far behind its owner a range sets out.
    """
    ranks = len(ranges)
    found: list[_Chunk] = []
    later = _LEAD * size / max(1, sum(stop - start for start, stop in ranges))
    for owner, (start, stop) in enumerate(ranges):
        hop = (place - owner - first_hop) % ranks
        for begin in range(start, stop, size):
            turn = (begin - start) / (stop - start) + hop * later
            found.append(_Chunk(turn, hop, _FIRST_TAG + len(found), begin, min(begin + size, stop)))
    return sorted(found)


def reduce_scatter_ring(group: dist.ProcessGroup, flat: Tensor, ranges: Sequence[Range]) -> None:
    """Add up ``flat`` over the ranks of a group, each range of it on the rank at its place. What else is in ``flat`` is spoilt; blocks."""
    _Ring(group, flat, ranges, adds=True).run()


def all_gather_ring(group: dist.ProcessGroup, flat: Tensor, ranges: Sequence[Range]) -> None:
    """Give every rank of a group the range of each, in place; blocks."""
    _Ring(group, flat, ranges, adds=False).run()


class _Ring:
    def __init__(self, group: dist.ProcessGroup, flat: Tensor, ranges: Sequence[Range], *, adds: bool) -> None:
        ranks = dist.get_process_group_ranks(group)
        place = dist.get_group_rank(group, dist.get_rank())
        size = chunk_elements(sum(stop - start for start, stop in ranges), len(ranks), flat.element_size())
        self._group, self._flat, self._adds = group, flat, adds
        self._to, self._source = ranks[(place + 1) % len(ranks)], ranks[(place - 1) % len(ranks)]
        self._last = len(ranks) - 1
        self._chunks = _chunks(ranges, place, 1 if adds else 0, size)
        self._sent: deque[dist.Work] = deque()

    def run(self) -> None:
        coming = self._receives()
        posted = deque(next(coming, None) for _ in range(_AHEAD))
        for chunk in self._chunks:
            own = self._flat[chunk.start : chunk.stop]
            if chunk.hop:
                received = posted.popleft()
                assert received is not None  # as many are posted as chunks come
                work, buffer = received
                work.wait()
                if self._adds:
                    own.add_(buffer)
                posted.append(next(coming, None))
            if chunk.hop < self._last:
                self._send(own, chunk.tag)
        for sent in self._sent:
            sent.wait()

    def _receives(self) -> Iterator[tuple[dist.Work, Tensor]]:
        """Post a receive for each chunk that comes from the rank before."""
        for chunk in self._chunks:
            if chunk.hop:
                own = self._flat[chunk.start : chunk.stop]
                buffer = torch.empty_like(own) if self._adds else own
                work = dist.irecv(buffer, src=self._source, group=self._group, tag=chunk.tag)
                assert work is not None  # this rank is in the group
                yield work, buffer

    def _send(self, own: Tensor, tag: int) -> None:
        work = dist.isend(own, dst=self._to, group=self._group, tag=tag)
        assert work is not None
        self._sent.append(work)
