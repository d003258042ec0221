"""A share of a core by stopping and continuing a worker: what remains where control groups cannot be written.

A thread of the emulator measures the CPU time that each worker's process group consumes, stops it when it is ahead of
its share and continues it when it has fallen behind. A worker that waits for others saves up one period at most; one that waits for a
core, because all are taken, saves up more.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import psutil

__all__ = ["PERIOD_S", "DutyCycle", "duty_cycle"]

PERIOD_S = 0.02
_LEAST_SLEEP_S = 0.0005
_LINUX = platform.system() == "Linux"
_OWED_PERIODS = 10
_MEMBERS_S = 0.25  # how often new processes of a worker are looked for


@dataclass(kw_only=True)
class _Paced:
    """One worker: ``credit_s`` is the CPU time that it may still use now."""

    leader: int
    speed: float
    credit_s: float
    consumed_s: dict[int, float] = field(default_factory=dict)
    stopped: bool = False

    @property
    def resume_at_s(self) -> float:
        """The credit at which it continues: then it runs for speed periods and stands for the rest of a period."""
        return self.speed * (1 - self.speed) * PERIOD_S

    def account(self, passed_s: float) -> None:
        """Add its share of the time that passed, take away what it used."""
        used_s = 0.0
        for pid, before_s in self.consumed_s.items():
            now_s = _cpu_s(pid)
            if now_s is not None:
                used_s += now_s - before_s
                self.consumed_s[pid] = now_s
        self.credit_s += self.speed * passed_s - used_s
        # Time for which it wanted to run and got no core is owed to it; time for which it waited of itself is not.
        periods = _OWED_PERIODS if not self.stopped and _wants_to_run(self.leader) else 1
        self.credit_s = min(self.credit_s, periods * self.speed * PERIOD_S)

    def look_for_members(self) -> None:
        """Processes that joined the group count from their start, those that are gone no more."""
        self.consumed_s = {pid: self.consumed_s.get(pid, 0.0) for pid in _group(self.leader)}

    def decide(self) -> float:
        """Stop or continue it; returns the seconds until the next decision."""
        if self.stopped and self.credit_s >= self.resume_at_s:
            self._send(signal.SIGCONT)
            self.stopped = False
        elif not self.stopped and self.credit_s <= 0:
            self._send(signal.SIGSTOP)
            self.stopped = True
        if self.stopped:
            return (self.resume_at_s - self.credit_s) / self.speed
        return self.credit_s / (1 - self.speed)

    def let_go(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.leader, number)


class DutyCycle:
    """Paces worker process groups from a thread of its own until it is closed."""

    def __init__(self) -> None:
        self._workers: list[_Paced] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heterodyne-duty-cycle", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pace(self, leader: int, speed: float) -> None:
        """Hold the process group of `leader` to `speed` of a core (0 < speed <= 1; 1 needs no holding)."""
        if speed < 1:
            with self._lock:
                self._workers.append(_Paced(leader=leader, speed=speed, credit_s=0.0))

    def close(self) -> None:
        """Stop pacing and let every worker go on."""
        self._closed.set()
        self._thread.join()
        for worker in self._workers:
            worker.let_go()

    def _run(self) -> None:
        last = time.monotonic()
        members_at, sleep_s = last, PERIOD_S
        while not self._closed.wait(sleep_s):
            now = time.monotonic()
            with self._lock:
                workers = list(self._workers)
            if now >= members_at:
                members_at = now + _MEMBERS_S
                for worker in workers:
                    worker.look_for_members()
            sleep_s = PERIOD_S
            for worker in workers:
                if not worker.consumed_s:
                    worker.look_for_members()
                worker.account(now - last)
                sleep_s = min(sleep_s, worker.decide())
            last, sleep_s = now, max(sleep_s, _LEAST_SLEEP_S)


@contextmanager
def duty_cycle() -> Iterator[DutyCycle]:
    """A running DutyCycle; at the end every worker is let go."""
    cycle = DutyCycle()
    cycle.start()
    try:
        yield cycle
    finally:
        cycle.close()


def _group(leader: int) -> list[int]:
    """The processes of a group. It is enough to look below its leader: the group was made for it."""
    with suppress(psutil.NoSuchProcess):
        family = [leader, *(child.pid for child in psutil.Process(leader).children(recursive=True))]
        return [pid for pid in family if _group_of(pid) == leader]
    return []


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _cpu_s(pid: int) -> float | None:
    """CPU time of all threads of a process; None if it is gone."""
    try:
        if _LINUX:
            # Another process's CPU clock, to the nanosecond (clock_getcpuclockid(3)); /proc counts in hundredths.
            return time.clock_gettime(~pid << 3 | 2)
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    except (OSError, psutil.Error):
        return None


def _wants_to_run(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_RUNNING)
    except psutil.Error:
        return False
