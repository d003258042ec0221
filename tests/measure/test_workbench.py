"""Meeting: nobody stands idle while others measure, nobody is left behind, nothing is swallowed."""

from __future__ import annotations

import threading

import pytest

from heterodyne.errors import MeasureError
from measure.fake_device import FakeClock, bench_of, until


class Work:
    """Counts how often it was done; from ``fails`` on it fails."""

    def __init__(self, fails: int = 10**9) -> None:
        self.done, self._fails = 0, fails

    def __call__(self) -> None:
        self.done += 1
        if self.done >= self._fails:
            raise RuntimeError("no more memory")


def test_who_is_done_computes_until_the_last_one_comes() -> None:
    work = Work()

    def gather(word: str | None) -> list[str | None]:
        until(lambda: work.done >= 100)  # the last rank comes when this one has computed a hundred times
        return [word, None]

    bench_of(FakeClock(), gather=gather, devices=("a", "b")).meet(work)
    assert work.done >= 100


def test_who_comes_last_computes_nothing() -> None:
    work = Work()
    bench_of(FakeClock(), gather=lambda word: [word]).meet(work)
    assert work.done == 0


def test_an_accelerator_is_not_given_more_than_it_does() -> None:
    """Each run is waited for, so that no queue of them is left when the others come."""
    work = Work()
    waited: list[int] = []

    class Accelerator(FakeClock):
        def wait(self) -> None:
            waited.append(work.done)

    def gather(word: str | None) -> list[str | None]:
        until(lambda: work.done >= 10)
        return [word]

    bench_of(Accelerator(), gather=gather).meet(work)
    assert waited == list(range(1, work.done + 1))


def test_a_meeting_that_fails_is_raised() -> None:
    def gather(word: str | None) -> list[str | None]:
        if threading.current_thread() is not threading.main_thread():
            until(lambda: work.done >= 3)
        raise ConnectionError("connection closed by peer")

    work = Work()
    bench = bench_of(FakeClock(), gather=gather)
    with pytest.raises(ConnectionError, match="closed by peer"):
        bench.meet()
    with pytest.raises(ConnectionError, match="closed by peer"):
        bench.meet(work)
    assert work.done >= 3


def test_work_that_fails_only_while_others_are_waited_for_is_no_failure() -> None:
    over = threading.Event()

    def gather(word: str | None) -> list[str | None]:
        until(lambda: work.done >= 3)
        over.set()
        return [word]

    work = Work(fails=3)
    bench_of(FakeClock(), gather=gather).meet(work)
    assert over.is_set()
    assert work.done == 3


def test_a_failure_of_any_rank_is_raised_on_every_rank_with_its_device() -> None:
    words = [None, "out of memory", None, "no such kernel", "out of memory"]
    bench = bench_of(FakeClock(), gather=lambda _: words, devices=("a", "b", "c", "d", "e"))
    for work in (None, Work()):
        with pytest.raises(MeasureError, match=r"^b, e: out of memory; d: no such kernel$"):
            bench.meet(work)


def test_interrupting_who_waits_leaves_nobody_behind() -> None:
    """The thread that waits for the others does not keep the process from ending."""
    never = threading.Event()
    seen: list[threading.Thread] = []

    def gather(word: str | None) -> list[str | None]:
        seen.append(threading.current_thread())
        never.wait(60)
        return [word]

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench_of(FakeClock(), gather=gather).meet(interrupted)
    assert seen[0].daemon
    never.set()
    seen[0].join()
