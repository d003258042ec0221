"""Checkpoints of several ranks: written together, failed together, read by any number of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.random_state import restore_random_state
from heterodyne.runtime.comm.agreement import Agreement
from multiprocess.pool import Pool, RemoteError, World

IDENTITY = {"job": {"training": {"seed": 0}}}


def state(value: float) -> dict[str, Any]:
    weights = {f"layer.{number}": torch.full((10_000,), value + number) for number in range(6)}
    return {"model": weights, "optimizer": {"state": {}, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]}}


def save(world: World, directory: Path, idle: int | None) -> dict[str, Any]:
    """One checkpoint; what each rank's generator gives next, and which files it wrote."""
    torch.manual_seed(100 + world.rank)
    checkpoints = Checkpoints(directory, agreement=Agreement.of_all())
    path = checkpoints.save(7, None if world.rank == idle else state(1.0), identity=IDENTITY, plan="{}")
    return {"draw": torch.rand(3).tolist(), "sizes": {file.name: file.stat().st_size for file in path.iterdir()}}


def load(world: World, directory: Path) -> dict[str, Any]:
    checkpoints = Checkpoints(directory, agreement=Agreement.of_all())
    found = checkpoints.latest()
    assert found is not None
    restored = checkpoints.load(found, identity=IDENTITY)
    assert restored.step == 7
    equal = all(torch.equal(restored.state["model"][name], wanted) for name, wanted in state(1.0)["model"].items())
    if restored.random is None:
        return {"equal": equal, "rest": restored.state["optimizer"], "draw": None}
    restore_random_state(restored.random)
    return {"equal": equal, "rest": restored.state["optimizer"], "draw": torch.rand(3).tolist()}


def fail_to_save(world: World, directory: Path, rank: int) -> str:
    checkpoints = Checkpoints(directory, agreement=Agreement.of_all())
    checkpoints.save(1, state(0.0), identity=IDENTITY, plan="{}")
    soft = hard = -1
    if world.rank == rank:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        checkpoints.save(2, state(0.0), identity=IDENTITY, plan="{}")
    except CheckpointError as error:
        return str(error)
    finally:
        if world.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "it worked"


def refuse(world: World, directory: Path) -> str:
    checkpoints = Checkpoints(directory, agreement=Agreement.of_all())
    found = checkpoints.latest()
    assert found is not None
    try:
        checkpoints.load(found, identity={"job": {"training": {"seed": 1}}})
    except CheckpointError as error:
        return str(error)
    return "it worked"


def save_without_end(world: World, directory: Path) -> None:
    agreement = Agreement.of_all()
    checkpoints = Checkpoints(directory, agreement=agreement)
    (directory / f"pid-{world.rank}").write_text(str(os.getpid()))
    for step in range(1, 100_000):
        checkpoints.save(step, {"w": torch.full((50_000,), step)}, identity=IDENTITY, plan="{}")


def agree(world: World) -> list[Any]:
    agreement = Agreement.of_all()

    def fail_on(rank: int) -> str:
        if world.rank == rank:
            raise HeterodyneError(f"rank {rank} says no")
        return f"rank {world.rank}"

    heard: list[Any] = [agreement.on_rank0(lambda: fail_on(1)), agreement.gather_or_raise(lambda: world.rank * 10)]
    heard.append(agreement.only_on_rank0(lambda: world.rank))
    for ask in (agreement.on_rank0, agreement.gather_or_raise, agreement.only_on_rank0):
        try:
            ask(lambda: fail_on(0))
        except HeterodyneError as error:
            heard.append(str(error))
    heard.append([agreement.ask(lambda: False)(), agreement.ask(lambda: world.rank == 1)()])
    return heard


def test_all_hear_what_one_says_its_errors_too(pool: Pool) -> None:
    errors = ["rank 0 says no"] * 3
    heard = pool.run(3, agree)
    assert heard[0] == ["rank 0", [0, 10, 20], 0, *errors, [False, True]]
    assert heard[1:] == [["rank 0", [0, 10, 20], None, *errors, [False, True]]] * 2


@pytest.mark.parametrize("idle", [None, 0, 1])
@pytest.mark.parametrize("readers", [1, 2, 3])
def test_what_ranks_wrote_together_any_number_reads(pool: Pool, tmp_path: Path, idle: int | None, readers: int) -> None:
    written = pool.run(2, save, tmp_path, idle)
    read = pool.run(readers, load, tmp_path)
    for rank, one in enumerate(read):
        assert one["equal"]
        assert one["rest"] == state(1.0)["optimizer"]
        assert one["draw"] == (written[rank]["draw"] if rank < 2 else None)
    if idle is None:
        sizes = [size for name, size in written[0]["sizes"].items() if name.endswith(".safetensors")]
        assert len(sizes) == 2, "both have written"
        assert sum(sizes) < 1.5 * 6 * 40_000, "and nothing twice"


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_rank_cannot_write_all_hear_why_and_the_previous_one_stays(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    told = pool.run(2, fail_to_save, tmp_path, rank)
    assert told[0] == told[1]
    assert "step 2 cannot be written" in told[0]
    assert f"rank {rank}: " in told[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_another_job_is_refused_by_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save, tmp_path, None)
    told = pool.run(2, refuse, tmp_path)
    assert told[0] == told[1]
    assert "job.training.seed: 0 there, 1 here" in told[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_all_write_leaves_a_whole_one(tmp_path: Path, rank: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    pool = Pool()
    with ThreadPoolExecutor(1) as background:
        running = background.submit(pool.run, 2, save_without_end, tmp_path)
        while not any(path.name.startswith("step-") and path.name[5:].isdigit() for path in tmp_path.iterdir()):
            assert not running.done()
            time.sleep(0.01)
        os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
        with pytest.raises(RemoteError):
            running.result()
    pool.close()
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.latest()
    assert found is not None
    restored = checkpoints.load(found, identity=IDENTITY)
    assert (restored.state["w"] == found.step).all()
    assert json.loads((found.path / "manifest.json").read_text())["world_size"] == 2
