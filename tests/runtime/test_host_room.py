"""A host without room for what plans keep there: who, what of it, and what to do, before anything is made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from heterodyne.errors import PlanError
from heterodyne.job import OptimizerSection
from heterodyne.runtime.weights.host_room import host_state_bytes, require_host_room

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
        require_host_room(told(*ranks), state_bytes=0, activation_bytes=0)
    assert all(words in str(caught.value) for words in said)


def test_what_there_is_room_for_is_kept() -> None:
    require_host_room(told(("left", GIB, GIB, 2 * GIB)), state_bytes=0, activation_bytes=0)


def test_a_rank_tells_what_it_keeps() -> None:
    said: list[Any] = []

    def gather(own: Any) -> list[Any]:
        said.append(own)
        return [own]

    require_host_room(SimpleNamespace(all_gather_object=gather), state_bytes=1600, activation_bytes=7)  # type: ignore[arg-type]
    ((_, state, activations, left),) = said
    assert (state, activations) == (1600, 7)
    assert left <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        (OptimizerSection(), 4 * 75),  # the weight, its gradient and two moments
        (OptimizerSection(name="sgd"), 3 * 75),
        (OptimizerSection(name="sgd", momentum=0.0), 2 * 75),
        (
            OptimizerSection(name="adafactor"),
            2 * 75 + (10 + 10) / 2 + 25,
        ),  # a row and a column of the matrix, half of which is here
        (torch.optim.AdamW, 4 * 75),  # as AdamW, whatever it is
    ],
)
def test_the_state_on_a_host_is_that_of_the_optimizer(optimizer: Any, values: float) -> None:
    parameters = {"matrix": torch.zeros(10, 10, dtype=torch.bfloat16), "vector": torch.zeros(25)}
    assert host_state_bytes(parameters, {"matrix": (0, 50)}, optimizer) == 4 * values
