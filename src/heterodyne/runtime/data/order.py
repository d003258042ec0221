"""The order of the samples: a permutation that is computed, not stored, and the position in it.

Which sample stands at a place is a pure function of (seed, epoch, place, count): it knows nothing of ranks, devices or plans,
needs no memory, and any place can be asked for, which is what makes a position resumable. It is a balanced Feistel
network over the next power of four, which is a bijection whatever its round function; places that fall outside of
``count`` are sent through again until they fall inside ("cycle walking": Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", CT-RSA 2002). The mixer of the rounds is that of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpochOrder", "Indices", "held_out", "shuffled"]

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """Epoch after epoch of ``count`` samples, each epoch in an order of its own.

    Position ``p`` of the training run is place ``p mod count`` of epoch ``p div count``. Step t of a batch of G samples takes
    positions ``[t G, (t + 1) G)``: a batch may begin in one epoch and end in the next, no sample is dropped, and the
    position is all that there is to remember, under any plan and any number of ranks.

    Args:
        seed: decides the order.
        shuffle: False: every epoch goes through the samples as they are.
    """

    count: int
    seed: int
    shuffle: bool = True

    def between(self, first: int, stop: int) -> Indices:
        """The samples at positions ``[first, stop)``.  # [stop - first]"""
        epochs, places = np.divmod(np.arange(first, stop, dtype=np.int64), self.count)
        if not self.shuffle:
            return places
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = shuffled(places[here], self.count, seed=self.seed, epoch=int(epoch))
        return chosen


def held_out(count: int, fraction: float) -> NDArray[np.bool_]:
    """For each of ``count`` samples whether it is kept apart for validation: ``fraction`` of them, evenly spread."""
    kept: NDArray[np.bool_] = np.diff(np.floor(np.arange(count + 1) * fraction + 0.5)) > 0
    return kept


def shuffled(places: Indices, count: int, *, seed: int, epoch: int) -> Indices:
    """The samples at ``places`` of the shuffled sequence of ``0 .. count - 1``.  # [N] -> [N]

    For fixed (count, seed, epoch) it is a bijection. Raises ValueError for a place outside of ``[0, count)``.
    """
    if places.size and (places.min() < 0 or places.max() >= count):
        raise ValueError(f"places must be in [0, {count}), they reach from {places.min()} to {places.max()}")
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    walking = places.astype(np.uint64)
    outside = np.ones(places.shape, dtype=np.bool_)
    while outside.any():
        walking[outside] = _permute(walking[outside], half_bits, keys)
        outside = walking >= np.uint64(count)
    return walking.astype(np.int64)


def _permute(values: Words, half_bits: int, keys: Words) -> Words:
    """A bijection of ``[0, 4 ** half_bits)``."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) & mask)
    return (left << bits) | right


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser; arithmetic wraps around at 2**64, as arrays of NumPy do."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _keys(seed: int, epoch: int) -> Words:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)
