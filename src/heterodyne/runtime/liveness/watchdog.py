"""In every worker two threads that notice when another worker has died or hangs, and end this one with its name.

Without them a worker would wait in a collective for half an hour and end with a message about a socket. One thread (the
pulse) writes a sign of life to the store and reads those of the others; the other one (the detector) never touches the
network, so it also notices a store that does not answer. It works the same under any launcher.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import NoReturn, Self

from heterodyne.errors import HeterodyneError, OutOfMemoryError, WorkerError
from heterodyne.processes import GAVE_UP_ON_A_PEER
from heterodyne.processes.parent import blame_another
from heterodyne.runtime.liveness.device_queue import DeviceQueue, Held
from heterodyne.runtime.liveness.failure_detector import (
    BETWEEN_STEPS,
    LIFE,
    CallProgress,
    Failure,
    FailureDetector,
    Heartbeat,
    Kind,
    Life,
    WatchLimits,
)
from heterodyne.runtime.liveness.members import Member
from heterodyne.runtime.liveness.signing import SignedStore
from heterodyne.runtime.liveness.tree import Report, children, neighbours, telling

__all__ = ["STORE_KEEPER", "Watchdog", "end_process"]

STORE_KEEPER = 0
"""The rank whose process has the store."""

_FAILURE = "failure"
_LEFT = "left"
_INTERRUPTED = 130
_FORGET = 0.98  # of what was late, in each round
_STOPPED = frozenset({"stopped", "tracing-stop"})
_ABOUT_TO_RUN = frozenset({"running", "disk-sleep"})
_ASLEEP = "it was stopped, or the machine was overloaded, and the others have given it up meanwhile"


def end_process(status: int) -> NoReturn:
    """End this process now, whatever its main thread is stuck in; flushing gets a second at most."""
    thread = threading.Thread(target=_quietly, args=(_flush,), daemon=True)
    thread.start()
    thread.join(1.0)
    os._exit(status)


class Watchdog:
    """Watches the other workers while the ``with`` block runs, and tells them of this one.

    The main thread says what it is doing: `progress` before each action that computes, `waiting` before it waits for
    others, `phase` around what takes long on purpose. Each is a few assignments.

    A worker counts as lost when its process is gone, when it gives no sign of life, or when it makes no progress while
    others wait for it (`WatchLimits`). Then every worker prints one line that names it and ends with status
    `GAVE_UP_ON_A_PEER`, even if its main thread is stuck in a collective. If the main thread gets an error because a peer
    is gone, it asks `blame` for the peer instead.

    Leaving the block by an exception tells the others that this worker failed and why.

    Args:
        store: a connection of its own to the one where the workers met; what is not signed is not believed.
        members: all workers, in order of rank.
        is_connected: whether the process of a rank on another machine has a connection with the store (`RunStore.is_connected`).
    """

    def __init__(
        self,
        store: SignedStore,
        *,
        rank: int,
        members: Sequence[Member],
        limits: WatchLimits | None = None,
        is_connected: Callable[[int], bool],
    ) -> None:
        self._limits = limits or WatchLimits()
        self._rank = rank
        self._members = tuple(members)
        self._is_connected = is_connected
        self._pulse_store = store

        self._doing: tuple[Kind, str, float, float] = ("phase", "starting", time.monotonic(), self._limits.phase_s)
        self._device: DeviceQueue | None = None
        self._rescue: Callable[[], None] | None = None
        self._phases = 0  # that have begun and not ended
        self._calls = CallProgress()
        self._trace = ""  # of the error of a call, which the script may catch
        self._raised: int | None = None  # the number of the latest call, if it raised an error
        self._raised_by_all = 0  # the number of the latest call that raised one on every rank
        self._called_s = time.monotonic()
        self._asked_after = 0  # the number of the call of which people were told that others have not come to it
        self._count = 0
        self._longest_s = {"work": 0.0, "wait": 0.0}

        self._neighbours = neighbours(rank, len(self._members))
        self._doubted: set[int] = set()  # whose signs of life are looked for, though others read them
        self._heartbeats: dict[int, Heartbeat] = {}  # of these, and the own
        self._subtree: dict[int, Heartbeat] = {}  # some of the others below
        self._relayed: dict[int, Heartbeat] = {}  # the same, and of the parent's
        self._heard = 1
        self._left_first: int | None = None
        self._rounds = 0
        self._lateness = {"pulse": 0.0, "detector": 0.0}  # of late, what the machine has made of these threads
        self._looked_s = time.monotonic()  # when the detector was last given time
        self._asleep_s = 0.0  # the longest that this process has got no time at all, of late
        self._seen_to_run: dict[
            int, tuple[float, float]
        ] = {}  # of silent workers of this machine: seconds of processor, and when
        self._left = threading.Event()
        self._failure: Failure | None = None
        self._published = threading.Event()
        self._decided = threading.Event()
        self._news = threading.Event()  # the pulse has something to say before its time
        self._asked = threading.Event()
        self._threads = [
            threading.Thread(target=self._run_pulse, name="heterodyne-pulse", daemon=True),
            threading.Thread(target=self._run_detector, name="heterodyne-detector", daemon=True),
        ]

    def __enter__(self) -> Self:
        if len(self._members) > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.tell(error) and len(self._members) > 1:
            time.sleep(min(self._limits.publish_s, 2 * self._limits.interval_s) if self._rank == STORE_KEEPER else 0.0)
        self._left.set()
        self._news.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)

    # What the main thread says

    def follow(self, device: DeviceQueue) -> None:
        """From now on look at what this rank's device has still to do, too: its host may wait for it anywhere, or be ahead of it."""
        self._device = device

    def before_out_of_memory(self, rescue: Callable[[], None]) -> None:
        """Set what this worker does before it ends because any worker is out of memory; from any thread, and perhaps twice."""
        self._rescue = rescue

    def progress(self, state: str) -> None:
        """The main thread begins an action that computes."""
        self._turn("work", state)

    def waiting(self, state: str) -> None:
        """The main thread begins to wait for other workers, in a collective for example."""
        self._turn("wait", state)

    @contextmanager
    def phase(self, state: str, limit_s: float | None = None) -> Iterator[None]:
        """Something that takes long on purpose: capturing, measuring, writing a checkpoint. There may be phases in a phase."""
        outer = self._doing if self._phases else None
        self._phases += 1
        self._doing = ("phase", state, time.monotonic(), self._limits.phase_s if limit_s is None else limit_s)
        try:
            yield
        finally:
            self._phases -= 1
            # Not an action: what follows until the next word of the main thread has no measure yet.
            self._doing = outer or ("phase", f"after {state}", time.monotonic(), self._limits.phase_s)

    @contextmanager
    def calling(self, words: str) -> Iterator[None]:
        """A call that every rank makes, in the same order; the next sign of life has its name and its number.

        Raises WorkerError where the call before raised an error here, and not on every rank: the messages of this call would be taken for
        some of that one.
        """
        if self._raised is not None and len(self._members) > 1:
            self._require_raised_by_all()
        self._raised = None
        self._calls = self._calls.begun(words)
        self._called_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._called_s = time.monotonic()
            self._calls = self._calls.ended(error)
            self._trace = traceback.format_exc()
            self._raised = self._calls.number
            self._news.set()
            raise
        self._called_s = time.monotonic()
        self._calls = self._calls.ended()

    def _require_raised_by_all(self) -> None:
        self.waiting(f"the others to have the error of {self._calls.latest}, too")
        while self._raised_by_all != self._raised:
            if self._decided.wait(self._limits.interval_s / 10) and (failure := self.blame()) is not None:
                raise failure

    def tell(self, error: BaseException) -> bool:
        """Tell the others that the main thread ends by an error, as when the block is left; return whether it is one (`sys.exit(0)` is
        none). After a lack of memory this returns when all have written what they hold.
        """
        if isinstance(error, SystemExit) and not error.code:
            return False
        self._decide(self._own_failure(error))
        self._asked.set()
        if len(self._members) > 1:
            self._published.wait(self._limits.publish_s)
        self._rescued()
        return True

    def blame(self) -> WorkerError | None:
        """Return who is at fault, for a main thread that got an error from a collective; None if everybody seems well.

        It waits until that is clear: the time of silence after which a worker counts as lost, at most.
        """
        self._asked.set()
        if len(self._members) == 1:
            return None
        rounds = self._rounds
        until = time.monotonic() + self._limits.longest_silence_s + 5 * self._limits.interval_s
        while not self._decided.wait(self._limits.interval_s) and time.monotonic() < until:
            left = self._left_first
            if left is not None and self._rounds > rounds + 1:  # nobody has said anything worse since
                self._decide(self._blame(self._members[left], "left while others still need it"))
        if self._decided.is_set():
            self._published.wait(self._limits.publish_s)  # another worker may have judged first
        failure = self._failure
        if failure is None:
            return None
        if failure.rank != self._rank:
            blame_another()
        kind = OutOfMemoryError if failure.out_of_memory else WorkerError
        return kind(failure.text, rank=failure.rank, host=failure.host)

    def _turn(self, kind: Kind, state: str) -> None:
        now = time.monotonic()
        before, _, since, _ = self._doing
        if before in self._longest_s and now - since > self._longest_s[before]:
            self._longest_s[before] = now - since
        self._count += 1
        if self._device is not None:
            self._device.ended(self._doing[1])
        self._doing = (kind, state, now, self._limit_s(kind))

    def _limit_s(self, kind: Kind) -> float:
        """Return how long an action of that kind may take: nothing is known before the first one has ended."""
        longest_s = self._longest_s["work"] if kind == "work" else max(self._longest_s.values())
        if self._longest_s[kind] == 0:
            return self._limits.phase_s
        return max(self._limits.stuck_s, self._limits.stuck_factor * longest_s)

    # The pulse

    def _run_pulse(self) -> None:
        try:
            while True:
                began = time.monotonic()
                self._round()
                self._note_late("pulse", time.monotonic() - began)
                if self._left.is_set() or self._published.is_set():
                    break
                self._news.wait(self._limits.interval_s)
                self._news.clear()
            if self._failure is None:
                self._pulse_store.set(_LEFT, str(self._rank))
                self._pulse_store.set(f"heartbeat/{self._rank}", self._report(self._heartbeat(left=True)).dump())
                self._pulse_store.get(_LEFT)  # a set is not answered: what is on its way may be lost with this process
        except (RuntimeError, ValueError) as error:  # what torch raises for a connection that is gone
            if not self._left.is_set():
                self._decide(self._store_is_gone(f"cannot be reached any more ({str(error).splitlines()[0][:120]})"))
            self._published.set()  # as far as that goes without a store

    def _round(self) -> None:
        store, own = self._pulse_store, self._heartbeat()
        store.set(f"heartbeat/{self._rank}", self._report(own).dump())
        if self._failure is not None:  # the first failure of all workers counts, so that all say the same
            self._failure = Failure.load(store.set_first(_FAILURE, self._failure.dump()))
            self._published.set()
        elif (text := store.get(_FAILURE)) is not None:
            self._decide(Failure.load(text))
            self._published.set()
        if (number := self._raised) is not None:
            store.set(f"raised/{number}/{self._rank}", "1")
            keys = [f"raised/{number}/{member.rank}" for member in self._members]
            if all(value is not None for value in store.get_all(keys)):
                self._raised_by_all = number
        asked = [*self._neighbours, *sorted(self._doubted)]
        told = store.get_all([f"heartbeat/{rank}" for rank in asked])
        reports = {rank: Report.load(text) for rank, text in zip(asked, told, strict=True) if text is not None}
        if self._asked.is_set() and self._left_first is None and (rank := store.get(_LEFT)) is not None:
            self._left_first = int(rank)
        below = [reports[rank] for rank in children(self._rank, len(self._members)) if rank in reports]
        self._subtree = {rank: heartbeat for report in below for rank, heartbeat in report.others.items()}
        self._heard = 1 + sum(report.heard for report in below)
        self._relayed = {rank: b for report in reports.values() for rank, b in report.others.items()} | self._subtree
        self._relayed.pop(self._rank, None)
        self._heartbeats |= {rank: report.own for rank, report in reports.items()} | {self._rank: own}
        self._rounds += 1

    def _report(self, own: Heartbeat) -> Report:
        below = {
            rank: b
            for rank in children(self._rank, len(self._members))
            if (b := self._heartbeats.get(rank)) is not None
        }
        return Report(own=own, others=telling(self._subtree | below), heard=self._heard)

    def _heartbeat(self, *, left: bool = False) -> Heartbeat:
        now, late_s = time.monotonic(), max(self._lateness.values())
        kind, state, since, limit_s = self._doing
        age_s, count = now - since, self._count
        held = self._held_by_device(kind, state, age_s, now)
        if held is not None:  # by others or by itself: that is known only of those whose devices have nothing to do
            kind, state, age_s = "wait", f"{held.action} on its device (its host in {state})", held.seconds
            limit_s, count = self._limit_s("wait"), count - held.left
        return Heartbeat(
            number=self._rounds,
            count=count,
            kind="left" if left else kind,
            state=state,
            age_s=age_s,
            limit_s=self._limits.patience_s(limit_s, late_s),
            calls=self._calls,
            call_age_s=now - self._called_s,
            late_s=late_s,
        )

    def _held_by_device(self, kind: Kind, state: str, age_s: float, now: float) -> Held | None:
        if self._device is None or kind not in ("work", "wait") or age_s < self._limits.interval_s:
            return None
        return self._device.held(now, None if state == BETWEEN_STEPS else state)

    # The detector

    def _run_detector(self) -> None:
        limits = self._limits
        detector = FailureDetector(
            rank=self._rank,
            members=self._members,
            limits=limits,
            now=time.monotonic(),
            life=self._life,
            watched=[self._rank, *self._neighbours],
        )
        rounds, stalled_s, last = -1, 0.0, time.monotonic()
        while not self._left.wait(limits.interval_s / 2):
            now = time.monotonic()
            self._note_late("detector", now - last - limits.interval_s / 2)
            self._looked_s = now
            stalled_s = 0.0 if self._rounds != rounds else stalled_s + min(now - last, self._limits.longest_round_s)
            rounds, last = self._rounds, now
            if stalled_s == 0:
                detector.observe(now, self._heartbeats, self._relayed, self._heard)
            if self._is_silent(stalled_s):
                self._decide(self._store_is_gone(f"has not answered for {stalled_s:.0f} s"))
            elif (failure := self._gone(detector) or detector.failure()) is not None:
                self._decide(failure)
            elif (waited := detector.waits_alone()) and self._asked_after < self._calls.number:
                self._asked_after = self._calls.number
                os.write(2, f"heterodyne: {waited}\n".encode())
            if self._failure is not None:
                self._give_up(self._failure)
                return

    def _note_late(self, thread: str, late_s: float) -> None:
        self._lateness[thread] = max(late_s, self._lateness[thread] * _FORGET)
        if thread == "detector":
            self._asleep_s = max(late_s, self._asleep_s * _FORGET)

    def _after_sleep(self) -> Failure | None:
        """Return what is wrong where this worker was given no time for so long that the others have ended without it."""
        asleep_s = max(self._asleep_s, time.monotonic() - self._looked_s - self._limits.interval_s / 2)
        if asleep_s < self._limits.silence_s / 2:
            return None
        return self._blame(self._members[self._rank], f"had no time of its machine for {asleep_s:.0f} s: {_ASLEEP}")

    def _is_silent(self, stalled_s: float) -> bool:
        """Return whether the store does not answer, for longer than the slowest of the workers that it serves is given."""
        limits, late_s = self._limits, max(self._lateness.values())
        if stalled_s <= limits.patience_s(limits.longest_silence_s, late_s):
            return False
        life = self._life(STORE_KEEPER)
        return stalled_s > limits.patience_s(limits.longest_silence_s, late_s, life)

    def _life(self, rank: int) -> Life:
        """Return whether a worker on this machine is stopped, or gets some time now and then; of others, whether they are there."""
        member = self._members[rank]
        if member.machine != self._members[self._rank].machine:
            return "connected" if self._is_connected(rank) else "unknown"
        status, ran_s, now = member.process_status(), member.processor_s(), time.monotonic()
        if status in _STOPPED:
            return "stopped"
        before_s, when = self._seen_to_run.get(rank, (-1.0, now))
        if ran_s > before_s or status in _ABOUT_TO_RUN:
            when = now
        self._seen_to_run[rank] = ran_s, when
        return "alive" if status is not None and now - when < self._limits.silence_s else "unknown"

    def _gone(self, detector: FailureDetector) -> Failure | None:
        """Return the first worker that is gone: the operating system knows those on this machine, who keeps the store those on others."""
        mine = self._members[self._rank].machine
        for member in self._members:
            if member.rank == self._rank or self._has_left(member.rank):
                continue
            near = member.machine == mine
            there = member.process_status() is not None if near else self._is_connected(member.rank)
            if (near or self._rank == STORE_KEEPER) and not there and not self._said_farewell(member.rank):
                how = "died" if near else "closed its connections: it died, or its host or the network is gone"
                return self._after_sleep() or detector.gone(member.rank, how=how)
        return None

    def _said_farewell(self, rank: int) -> bool:
        """A worker that is gone may have left in peace, or said why it failed, since the last round: look again."""
        self._doubted = self._doubted | {rank}
        before = self._rounds
        late_s = max(self._lateness.values())
        until = time.monotonic() + self._limits.patience_s(self._limits.longest_round_s, late_s)
        while self._rounds < before + 2 and time.monotonic() < until and self._failure is None:
            if self._left.wait(self._limits.interval_s / 10):
                return True
        return self._failure is not None or self._has_left(rank)

    def _has_left(self, rank: int) -> bool:
        heartbeat = self._heartbeats.get(rank)
        return heartbeat is not None and heartbeat.kind == "left"

    def _give_up(self, failure: Failure) -> None:
        """End this process, unless its main thread is doing so by itself."""
        self._published.wait(self._limits.publish_s)
        self._rescued()  # here, because the main thread may hang
        # A moment for the main thread, which may be about to fail of the same cause; and, where the store is kept, for
        # the others to read the failure from here.
        if self._left.wait(self._limits.publish_s) or (self._asked.is_set() and self._left.wait(self._limits.handle_s)):
            return
        me = self._members[self._rank]
        own = self._trace if failure.rank == self._rank else ""
        os.write(2, f"{own}heterodyne: rank {me.rank} on {me.host} stops: {failure.text}\n".encode())
        if failure.rank == self._rank:
            with suppress(OSError, ValueError):  # standard error may be closed or not a file
                if not own:
                    faulthandler.dump_traceback(all_threads=True)
            end_process(1)
        end_process(_INTERRUPTED if failure.interrupted else GAVE_UP_ON_A_PEER)

    def _rescued(self) -> None:
        """Rescue, and wait for the others to do so: whoever launched the workers ends all when the first has ended."""
        if self._failure is None or not self._failure.out_of_memory:
            return
        if self._rescue is not None:
            self._rescue()
        until = time.monotonic() + self._limits.rescue_s
        with suppress(RuntimeError, ValueError):  # the store may be gone, with a rank that waits no more
            self._pulse_store.set(f"rescued/{self._rank}", "")
            while time.monotonic() < until and self._rescuing():
                time.sleep(self._limits.interval_s / 10)

    def _rescuing(self) -> bool:
        done = self._pulse_store.get_all([f"rescued/{rank}" for rank in range(len(self._members))])
        mine = self._members[self._rank].machine
        return any(
            text is None and (member.machine != mine or member.process_status() is not None)
            for member, text in zip(self._members, done, strict=True)
        )

    # Failures

    def _decide(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._decided.set()
            self._news.set()

    def _own_failure(self, error: BaseException) -> Failure:
        me = self._members[self._rank]
        if isinstance(error, KeyboardInterrupt):
            return Failure(rank=me.rank, host=me.host, text=f"{me} was interrupted", interrupted=True)
        if isinstance(error, HeterodyneError):  # made for people, and short
            blamed = self._blame(me, f"failed: {type(error).__name__}: {error}")
            return replace(blamed, out_of_memory=isinstance(error, OutOfMemoryError))
        first = (str(error).strip().splitlines() or [""])[0]
        return self._blame(me, f"failed: {type(error).__name__}: {first}")

    def _store_is_gone(self, how: str) -> Failure:
        if (asleep := self._after_sleep()) is not None:
            return asleep
        keeper = self._members[STORE_KEEPER]
        life = self._life(STORE_KEEPER)
        return self._blame(keeper, f"keeps the store, and {how}" + ("" if life == "unknown" else f"; it {LIFE[life]}"))

    def _blame(self, member: Member, happened: str) -> Failure:
        return Failure(rank=member.rank, host=member.host, text=f"{member} {happened}")


def _quietly(action: Callable[[], None]) -> None:
    # The process ends either way, and must not end with the wrong status because a file could not be closed.
    with suppress(Exception):
        action()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
