"""Jobs on a group of processes, several cases to one start of it, and how far off what they find is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.split.group import Group
from multiprocess.pool import Pool, World

Found = TypeVar("Found")


class Cut(Protocol):
    """A case: it says how many there are of what is cut, for each member."""

    @property
    def sizes(self) -> tuple[int, ...]: ...


Case = TypeVar("Case", bound=Cut)

quick = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Counting(Group):
    """Counts exchanges, and the elements that this member sends to others."""

    exchanges = 0
    sent = 0

    def begin_all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Callable[[], list[Tensor]]:
        self.exchanges += 1
        self.sent += sum(part.numel() for member, part in enumerate(parts) if member != self.position)
        return super().begin_all_to_all(parts, shapes)


def each_of(world: World, job: Callable[[Counting, Case], Found], cases: list[Case]) -> list[Found]:
    """What this member finds in each case, in one group of all ranks."""
    device = torch.device("cpu")
    with Communicator(rank=world.rank, world_size=world.world_size, device=device, timeout_s=20.0) as communicator:
        process_group = communicator.process_group(range(world.world_size))
        found = [job(Counting(process_group, world.rank, world.world_size), case) for case in cases]
        communicator.barrier()  # who leaves early may cut off who still connects
    return found


def on_members(pool: Pool, job: Callable[[Counting, Case], Found], cases: list[Case]) -> list[list[Found]]:
    """For each case what the members find."""
    results = pool.run(len(cases[0].sizes), each_of, job, cases)
    return [list(found) for found in zip(*results, strict=True)]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest value; 0 if both are nan in the same places."""
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    assert torch.equal(found.isnan(), expected.isnan())
    found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def several(cases: Callable[[int], st.SearchStrategy[Case]]) -> st.SearchStrategy[list[Case]]:
    """Cases for the same number of members: one start of the group serves them all."""
    return st.integers(2, 4).flatmap(lambda members: st.lists(cases(members), min_size=4, max_size=8))
