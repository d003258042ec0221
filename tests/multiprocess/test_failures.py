"""Whatever happens to a worker, every other one ends, and says to whom it happened."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from heterodyne.emulate.duty_cycle import duty_cycle
from heterodyne.processes import GAVE_UP_ON_A_PEER
from heterodyne.runtime.liveness.failure_detector import WatchLimits
from multiprocess.crowd import Crowd, Worker
from multiprocess.misfortunes import QUICK, loop, meet_briefly, spin, stay, work, work_in_channels


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with Crowd() as crowd:
        yield crowd


def start(crowd: Crowd, misfortune: str, whose: int, world_size: int = 3) -> list[Worker]:
    return [crowd.start(work, misfortune, whose, rank=rank, world_size=world_size) for rank in range(world_size)]


def test_workers_without_misfortune_end_in_peace(crowd: Crowd) -> None:
    workers = start(crowd, "none", -1)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert [worker.output for worker in workers] == ["done\n"] * 3


def test_a_worker_alone_needs_nobody(crowd: Crowd) -> None:
    worker = crowd.start(work, rank=0, world_size=1)
    assert worker.wait() == 0
    assert worker.output == "done\n"


MISFORTUNES = ("killed", "stopped", "hangs", "fails")


# Rank 0 keeps the store, so it is another matter when it is the victim.
@pytest.fixture(scope="module", params=[0, 2])
def victim(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def unlucky(victim: int) -> Iterator[dict[str, list[Worker]]]:
    """The workers of each misfortune, all at the same time: most of it is waiting."""
    with ExitStack() as stack:
        yield {name: start(stack.enter_context(Crowd()), name, victim) for name in MISFORTUNES}


@pytest.mark.parametrize(
    ("misfortune", "words", "status"),
    [
        ("killed", ("died", "keeps the store"), -signal.SIGKILL),
        ("stopped", ("no sign of life", "keeps the store, and has not answered"), None),
        ("hangs", ("hangs in 0F3",), 1),
        ("fails", ("failed: DataError: the file ends here",), 2),
    ],
)
def test_the_others_end_and_name_the_victim(
    unlucky: dict[str, list[Worker]], misfortune: str, words: tuple[str, ...], status: int | None, victim: int
) -> None:
    workers = unlucky[misfortune]
    for rank, worker in enumerate(workers):
        if rank != victim:
            assert worker.wait() == GAVE_UP_ON_A_PEER, worker.output
            assert f"rank {victim} on {socket.gethostname()} (process {workers[victim].pid})" in worker.output
            assert any(word in worker.output for word in words), worker.output
            assert "done" not in worker.output
    if status is not None:
        assert workers[victim].wait() == status
    if misfortune == "stopped":
        workers[victim].signal(signal.SIGCONT)
        assert workers[victim].wait() != 0
        assert "had no time of its machine for" in workers[victim].output
        assert " died" not in workers[victim].output, "it does not blame those that gave it up"
    assert misfortune != "hangs" or "in suffer" in workers[victim].output, "it shows where"


def test_a_fault_of_one_rank_is_told_by_the_others_in_all_its_words(crowd: Crowd) -> None:
    workers = [crowd.start(work_in_channels, 1, rank=rank, world_size=2) for rank in range(2)]
    assert workers[0].wait() == GAVE_UP_ON_A_PEER, workers[0].output
    assert "failed: DataError: sample 17 cannot be read\n  own.py:3: raise" in workers[0].output
    assert workers[1].wait() == 2


@pytest.mark.parametrize("announced", [True, False])
def test_a_rank_that_is_busy_alone_is_spared_if_it_says_so_and_else_told_how(crowd: Crowd, announced: bool) -> None:
    limits = WatchLimits(
        interval_s=0.1, silence_s=5.0, phase_silence_s=5.0, stuck_s=0.5, phase_s=1.0, publish_s=0.5, handle_s=0.5
    )
    workers = [crowd.start(loop, announced, limits, rank=rank, world_size=2) for rank in range(2)]
    ends = [worker.wait() for worker in workers]
    assert ends == ([0, 0] if announced else [1, GAVE_UP_ON_A_PEER]), [worker.output for worker in workers]
    assert announced or 'with trainer.phase("uploading", limit_s=3600)' in workers[1].output


def test_an_interruption_is_no_failure(crowd: Crowd) -> None:
    workers = start(crowd, "interrupted", 1, world_size=2)
    assert workers[1].wait() == 130
    assert workers[0].wait() in {130, GAVE_UP_ON_A_PEER}
    assert "was interrupted" in workers[0].output


def test_leaving_early_is_named(crowd: Crowd) -> None:
    workers = start(crowd, "leaves", 1, world_size=2)
    assert workers[1].wait() == 0
    assert workers[0].wait() == GAVE_UP_ON_A_PEER
    assert f"(process {workers[1].pid}) left while others still need it" in workers[0].output


def test_nobody_is_blamed_for_a_pause_of_all(crowd: Crowd) -> None:
    workers = [crowd.start(stay, 1.0, rank=rank, world_size=2) for rank in range(2)]
    while not all("here" in worker.output for worker in workers):
        time.sleep(0.02)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for worker in workers:
            worker.signal(number)
        if number == signal.SIGSTOP:
            time.sleep(1.5 * QUICK.phase_silence_s)
    assert [worker.wait() for worker in workers] == [0, 0], [worker.output for worker in workers]


def test_a_slow_worker_is_not_taken_for_dead(crowd: Crowd) -> None:
    limits = WatchLimits(interval_s=0.2, silence_s=5.0, phase_silence_s=5.0, stuck_s=5.0, phase_s=60.0)
    with duty_cycle() as cycle:
        workers = [crowd.start(spin, limits, rank=rank, world_size=2) for rank in range(2)]
        cycle.pace(workers[1].pid, 0.1)
        assert [worker.wait() for worker in workers] == [0, 0], [worker.output for worker in workers]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_elsewhere_that_runs_no_python_for_long_is_not_taken_for_dead(crowd: Crowd, victim: int) -> None:
    workers = [crowd.start(work, "holds the GIL", victim, QUICK, True, rank=rank, world_size=3) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0], [worker.output for worker in workers]


def test_a_worker_elsewhere_that_dies_is_known_by_its_connections(crowd: Crowd) -> None:
    workers = [crowd.start(work, "killed", 2, QUICK, True, rank=rank, world_size=3) for rank in range(3)]
    assert [worker.wait() for worker in workers] == [GAVE_UP_ON_A_PEER, GAVE_UP_ON_A_PEER, -signal.SIGKILL]
    assert "closed its connections: it died, or its host or the network is gone" in workers[1].output


def test_a_rank_that_two_workers_claim_is_named_with_both(crowd: Crowd) -> None:
    workers = [crowd.start(meet_briefly, 30.0, rank=rank, world_size=3) for rank in (0, 1, 1)]
    for worker in workers:
        assert worker.wait() != 0
        assert "rank 1 is claimed twice" in worker.output
        assert f"(process {workers[1].pid})" in worker.output
        assert f"(process {workers[2].pid})" in worker.output


def test_a_second_rank_0_is_named_with_both(crowd: Crowd) -> None:
    workers = [crowd.start(meet_briefly, 30.0, rank=0, world_size=2) for _ in range(2)]
    for worker in workers:
        assert worker.wait() == 2
        assert "rank 0 is claimed twice" in worker.output


def test_missing_ranks_are_named(crowd: Crowd) -> None:
    workers = [crowd.start(meet_briefly, 1.0, rank=rank, world_size=4) for rank in (0, 2)]
    for worker in workers:
        assert worker.wait() == GAVE_UP_ON_A_PEER
        assert "ranks 1, 3 of 4 never came within 1 s" in worker.output


def test_without_rank_0_the_address_is_named(crowd: Crowd) -> None:
    worker = crowd.start(meet_briefly, 0.5, rank=1, world_size=2)
    assert worker.wait() == GAVE_UP_ON_A_PEER
    assert "found nobody at MASTER_ADDR:MASTER_PORT 127.0.0.1:" in worker.output
