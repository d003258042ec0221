"""What the signs of life of a run cost: bytes a second that each of up to 1,024 ranks sends and receives, by its own watchdog.

Every rank's watchdog does its rounds against a store in memory, which counts what a client of torch's store would send and receive: keys,
values, eight bytes for each length and one for the command. Three states: all train, all wait for one, all in different calls.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from results import Results, arguments, spread

from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.liveness.watchdog import Watchdog

ROUNDS = 6  # more than the tree is deep
BAR = 10_000.0  # bytes a second and rank
_LENGTH = 8


class Counted:
    """A store in memory. ``bytes``: of the client that asks."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        self._entries = entries
        self.bytes = 0

    def clone(self) -> Counted:
        return self

    def set_timeout(self, _: timedelta) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        self.bytes += 1 + 2 * _LENGTH + len(key) + len(value)
        self._entries[key] = value.encode()

    def check(self, keys: Sequence[str]) -> bool:
        self.bytes += 2 + _LENGTH + sum(_LENGTH + len(key) for key in keys)
        return all(key in self._entries for key in keys)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = [self._entries[key] for key in keys]
        self.bytes += 1 + 2 * _LENGTH + sum(2 * _LENGTH + len(key) for key in keys) + sum(map(len, found))
        return found


def traffic(size: int, state: str) -> list[int]:
    """Bytes of each rank in a round."""
    members = [Member(rank=r, host=f"node-{r // 8:03}.cluster", pid=4000 + r, machine=f"{r // 8}") for r in range(size)]
    entries: dict[str, bytes] = {}
    stores = [Counted(entries) for _ in members]
    dogs = [
        Watchdog(
            SignedStore(store_of(s), b"secret", timeout_s=1.0), rank=r, members=members, is_connected=lambda _: True
        )
        for r, s in enumerate(stores)
    ]
    for rank, dog in enumerate(dogs):
        with dog.calling(f"validate() {rank}" if state == "all in different calls" else "step()"):
            if state == "all train" and rank % 2:
                dog.progress(f"{rank % 16}F{rank % 7} block.{rank % 40}.attention")
            elif state == "all wait for one" and rank == size - 1:
                dog.progress("3B7 block.17.mlp")
            else:
                dog.waiting(f"{rank % 16}REDUCE_GRAD{rank % 7}")
            dog._round()
    for _ in range(ROUNDS):
        before = [store.bytes for store in stores]
        for dog in dogs:
            dog._round()
    return [store.bytes - b for store, b in zip(stores, before, strict=True)]


def store_of(counted: Counted) -> Any:
    return counted


def main() -> int:
    options = arguments(__doc__)
    results = Results("heartbeats")
    for size in (8, 64, 1024) if options.quick else (8, 64, 256, 1024):
        for state in ("all train", "all wait for one", "all in different calls"):
            of_ranks = [float(count) for count in traffic(size, state)]
            results.row(
                f"{size:,} ranks, {state}", of_a_rank=spread(of_ranks), most=max(of_ranks), all_ranks=sum(of_ranks)
            )
            if size == 1024:
                results.bar(f"bytes a second of the busiest of 1,024 ranks, {state}", max(of_ranks), f"<= {BAR:g}")
    return results.write(options.json)


if __name__ == "__main__":
    sys.exit(main())
