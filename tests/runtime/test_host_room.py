"""A host without room for what plans keep there: who, what of it, and what to do, before anything is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from heterodyne.errors import PlanError
from heterodyne.runtime.weights.host_room import require_host_room

GIB = 2**30


def told(*ranks: tuple[str, int, int, int]) -> Any:
    """A communicator whose ranks say what they keep: host, bytes of state, of activations, and what is left."""
    return SimpleNamespace(all_gather_object=lambda own: list(ranks))


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [("left", 3 * GIB, 0, 5 * GIB), ("left", 3 * GIB, 0, 4 * GIB)],
            ["keeps optimizer state (6 GiB) in the memory of host left, where 4 GiB are left: leave 'offload' out of"],
        ),
        (
            [("left", 0, 2 * GIB, GIB), ("right", 0, 2 * GIB, 3 * GIB)],
            ["keeps activations (2 GiB) in the memory of host left, where 1 GiB are left: leave 'offload_activations'"],
        ),
        (
            [("left", GIB, GIB, GIB), ("right", GIB, 3 * GIB, 2 * GIB)],
            [
                "keeps optimizer state (1 GiB) and activations (1 GiB) in the memory of host left, where 1 GiB are",
                "keeps optimizer state (1 GiB) and activations (3 GiB) in the memory of host right, where 2 GiB are left: "
                "leave 'offload' or 'offload_activations' out of some of its stages, or free memory",
            ],
        ),
    ],
)
def test_hosts_without_room_are_named(ranks: list[tuple[str, int, int, int]], said: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        require_host_room(told(*ranks), elements=0, activation_bytes=0)
    assert all(words in str(caught.value) for words in said)


def test_what_there_is_room_for_is_kept() -> None:
    require_host_room(told(("left", GIB, GIB, 2 * GIB)), elements=0, activation_bytes=0)


def test_a_rank_tells_what_it_keeps() -> None:
    said: list[Any] = []

    def gather(own: Any) -> list[Any]:
        said.append(own)
        return [own]

    require_host_room(SimpleNamespace(all_gather_object=gather), elements=100, activation_bytes=7)  # type: ignore[arg-type]
    ((_, state, activations, left),) = said
    assert (state, activations) == (1600, 7)  # of AdamW: the weight, its gradient and two moments in fp32
    assert left <= psutil.virtual_memory().total
