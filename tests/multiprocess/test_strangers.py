"""Who does not have the run's secret runs nothing on its ranks: not through its store, and not as one of its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from heterodyne.errors import WorkerError
from heterodyne.runtime.comm.objects import Objects
from multiprocess.pool import Pool, World

KEY = b"the key of this run"


class Attack:
    """Whoever unpickles one makes a file."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


def beside_a_stranger(world: World, mark: Path, verb: str, replays: bool) -> list[Any]:
    """What each rank reads in turn; the last of them, who is the stranger, sends an attack the second time."""
    stranger = world.rank == world.world_size - 1
    group = dist.group.WORLD
    objects = Objects(group, KEY)

    def exchange(value: Any) -> Any:
        return objects.gather(value) if verb == "gather" else objects.broadcast(value, world.world_size - 1)

    read: list[Any] = [exchange(world.rank)]
    if stranger:
        objects = Objects(group, KEY if replays else b"another key")
    try:
        read.append(exchange(Attack(mark) if stranger else "x" * 5000))
    except WorkerError as error:
        read.append((error.rank, str(error)))
    return [] if stranger else read  # a result is pickled too


@pytest.mark.parametrize("verb", ["gather", "broadcast"])
@pytest.mark.parametrize("replays", [False, True], ids=["another key", "an old number"])
def test_what_a_rank_has_not_signed_is_not_unpickled(pool: Pool, tmp_path: Path, verb: str, replays: bool) -> None:
    mark = tmp_path / "ran"
    found = pool.run(2, beside_a_stranger, mark, verb, replays)
    assert found[0][0] == ([0, 1] if verb == "gather" else 1)
    rank, text = found[0][1]
    assert rank == 1
    assert "rank 1 is not signed with the secret of this run, so it was not read" in text
    assert not mark.exists()


def sizes(world: World) -> list[list[int]]:
    objects = Objects(dist.group.WORLD, KEY)
    lengths = [0, 900, 1200, 3_000_000]
    gathered = [list(map(len, objects.gather(b"x" * (length * world.rank)))) for length in lengths]
    return [*gathered, [len(objects.broadcast(b"x" * length, world.world_size - 1)) for length in lengths]]


def test_objects_of_all_sizes_arrive(pool: Pool) -> None:
    lengths = [0, 900, 1200, 3_000_000]
    expected = [[0, length, 2 * length] for length in lengths] + [lengths]
    assert pool.run(3, sizes) == [expected] * 3
