"""Who is at fault when workers wait for each other: pure reasoning over what each said of itself and when.

Time is counted as the detector lives through it: a round that comes late (this worker was throttled or stopped itself)
counts for a few intervals at most, so a detector that was asleep does not take its own sleep for the silence of others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

from heterodyne.runtime.liveness.members import Member

__all__ = ["BETWEEN_STEPS", "LIFE", "CallProgress", "Failure", "FailureDetector", "Heartbeat", "Life", "WatchLimits"]

BETWEEN_STEPS = "between steps"
"""The state in which a device does what the caller gives it, of which nothing is known here."""

Kind = Literal["work", "wait", "phase", "left"]
Life = Literal["unknown", "stopped", "alive", "connected"]
"""What the system says of a worker that is silent: nothing, that it is stopped, that it runs, if only with little of the processor, or that
its process is there, on another machine."""
LIFE: dict[Life, str] = {
    "unknown": "was killed or stopped, or its host or the network is gone",
    "stopped": "is stopped (SIGSTOP, a debugger, or the job control of a shell)",
    "alive": "runs, but its machine gives it next to no time",
    "connected": "is there, since its connections are open, but its threads do not run: it is stopped, or holds Python's lock (GIL)",
}


@dataclass(frozen=True, kw_only=True)
class WatchLimits:
    """When a worker counts as lost.

    Args:
        interval_s: between two signs of life.
        silence_s: without a sign of life, while it works. Longer where signs of life were late before, see `patience_s`.
        phase_silence_s: the same during an announced phase (set-up), where other threads may starve for long.
        stuck_s: without progress while others wait for it so long, though it gives signs of life.
        stuck_factor: as many times the longest action seen of that worker, if that is more than `stuck_s`.
        phase_s: the longest that a phase may take unless it says otherwise; also for the very first action.
        raised_s: how long others may be in a call that raised an error on one rank, until that is taken for an error of that rank alone.
        call_s: how long a worker waits in a call that others have not come to before people are informed.
        publish_s: how long a worker that gives up stays to let the others read why; rank 0 keeps the store.
        rescue_s: how long a worker that ends for a lack of memory waits for the others to write what they hold.
        handle_s: how long the main thread may take to end by itself once it asked who is at fault.
    """

    interval_s: float = 1.0
    silence_s: float = 15.0
    phase_silence_s: float = 25.0
    stuck_s: float = 20.0
    stuck_factor: float = 20.0
    phase_s: float = 600.0
    raised_s: float = 2.0
    call_s: float = 15.0
    publish_s: float = 2.0
    rescue_s: float = 1800.0
    handle_s: float = 5.0

    @property
    def longest_round_s(self) -> float:
        """Return what a late round of the detector counts for at most."""
        return 4 * self.interval_s

    @property
    def longest_silence_s(self) -> float:
        return max(self.silence_s, self.phase_silence_s)

    def patience_s(self, silence_s: float, late_s: float, life: Life = "unknown") -> float:
        """Return how long a silence is borne where signs of life came so late before: a starved worker is not a dead one."""
        borne_s = silence_s + _LATE_FACTOR * late_s
        return _ALIVE_FACTOR * borne_s if life in ("alive", "connected") else borne_s


@dataclass(frozen=True, slots=True)
class CallProgress:
    """The calls that a worker makes and every other one makes too, in the same order: the latest, by number and name, and the one before.

    ``inside``: it has not come back from the latest yet. ``raised``: the latest that ended with an error, and which one.
    """

    number: int = 0
    latest: str = ""
    before: str = ""
    inside: bool = False
    raised: int = 0
    error: str = ""

    def begun(self, words: str) -> CallProgress:
        return replace(self, number=self.number + 1, latest=words, before=self.latest, inside=True)

    def ended(self, error: BaseException | None = None) -> CallProgress:
        after = replace(self, inside=False)
        if error is None:
            return after
        first = (str(error).strip().splitlines() or [""])[0]
        return replace(after, raised=self.number, error=f"{self.latest} raised {type(error).__name__}: {first[:200]}")

    def name_of(self, number: int) -> str:
        """ "" if it is not known."""
        return {self.number: self.latest, self.number - 1: self.before}.get(number, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a worker says of itself, once an interval.

    Args:
        number: grows by one with each heartbeat.
        count: how many actions it has begun.
        kind: it computes (`work`), waits for others (`wait`), is in a long announced `phase`, or has `left` in peace.
        state: the action or the phase, for people.
        age_s: how long it has been in that state.
        limit_s: how long it may be.
        calls, call_age_s: the calls that it makes together with the others, and how long it has been in the latest, or out of it.
        late_s: how late a thread of this worker was lately, that had nothing to do but to wake up.
    """

    number: int
    count: int
    kind: Kind
    state: str
    age_s: float
    limit_s: float
    calls: CallProgress = CallProgress()
    call_age_s: float = 0.0
    late_s: float = 0.0

    @classmethod
    def of(cls, fields: Sequence[Any]) -> Heartbeat:
        """The inverse of `fields`."""
        calls, *own = fields
        return cls(**dict(zip(_HEARTBEAT, own, strict=True)), calls=CallProgress(*calls))

    def fields(self) -> list[Any]:
        """Its values without their names, as JSON, and seconds in few digits: they are sent each second."""
        values = (getattr(self, name) for name in _HEARTBEAT)
        own = [round(value, 2) if isinstance(value, float) else value for value in values]
        return [list(astuple(self.calls)), *own]


_HEARTBEAT = [field.name for field in dataclasses.fields(Heartbeat) if field.name != "calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Who is at fault (None: nobody in particular), what happened in words, and whether it was only an interruption, or a lack of memory,
    after which what all ranks hold is still good.
    """

    rank: int | None
    host: str | None
    text: str
    interrupted: bool = False
    out_of_memory: bool = False

    @classmethod
    def load(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    def dump(self) -> str:
        return json.dumps(asdict(self))


_LATE_FACTOR = 10.0
_ALIVE_FACTOR = 8.0


class FailureDetector:
    """Keeps what was last heard of each worker and since when it is silent.

    Args:
        life: what the machine says of a rank, if it can.
        watched: the ranks whose silence is judged here; None: all.
    """

    def __init__(
        self,
        *,
        rank: int,
        members: Sequence[Member],
        limits: WatchLimits,
        now: float,
        life: Callable[[int], Life] = lambda _: "unknown",
        watched: Collection[int] | None = None,
    ) -> None:
        self._life = life
        self._rank = rank
        self._members = members
        self._limits = limits
        self._now = now
        self._heartbeats: dict[int, Heartbeat] = {}
        self._watched = range(len(members)) if watched is None else watched
        self._silence_s = dict.fromkeys(range(len(members)), 0.0)  # 0 for those who are not watched
        self._heard = 0

    def observe(
        self,
        now: float,
        heartbeats: Mapping[int, Heartbeat],
        relayed: Mapping[int, Heartbeat] | None = None,
        heard: int | None = None,
    ) -> None:
        """Take in the newest heartbeat of each worker that is watched (those of before may be repeated) at local time `now`.

        Args:
            relayed: some of the others, that another worker reported.
            heard: how many workers there are of which anything is known; None: those given.
        """
        passed = min(now - self._now, self._limits.longest_round_s)
        self._now = now
        kept = {rank: self._heartbeats[rank] for rank in self._watched if rank in self._heartbeats}
        for rank in self._watched:
            heartbeat, known = heartbeats.get(rank), kept.get(rank)
            if heartbeat is not None and (known is None or heartbeat.number != known.number):
                kept[rank] = heartbeat
                self._silence_s[rank] = 0.0
            else:
                self._silence_s[rank] += passed
        self._heartbeats = {**(relayed or {}), **kept}
        self._heard = len(self._heartbeats) if heard is None else heard

    def failure(self) -> Failure | None:
        """The first fault found: silence, calls that differ, hanging, deadlock; None if all is well."""
        return self._raised() or self._silent() or self._parted() or self._stuck() or self._deadlocked()

    def waits_alone(self) -> str:
        """In words, if this worker is in a call that others have not come to for long; they may still do so. "" if not."""
        own = self._heartbeats.get(self._rank)
        if own is None or not own.calls.inside or own.call_age_s + self._silence_s[self._rank] < self._limits.call_s:
            return ""
        late = [
            rank
            for rank, heartbeat in self._heartbeats.items()
            if heartbeat.kind != "phase"
            and not heartbeat.calls.inside
            and heartbeat.calls.number == own.calls.number - 1
        ]
        if not late:
            return ""
        before = self._heartbeats[late[0]].calls.latest
        return (
            f"rank {self._rank} waits in {own.calls.latest} for {own.call_age_s:.0f} s: {_have(late)} not come to it"
            + (f", and nothing else since {before}" if before else "")
            + f". Every rank makes the same calls in the same order; {_REMEDY}"
        )

    def gone(self, rank: int, *, how: str = "died") -> Failure:
        """The failure of a worker whose process does not exist any more."""
        return self._blame(rank, f"{how}{self._last_seen(rank)}")

    def _silent(self) -> Failure | None:
        own = self._heartbeats.get(self._rank)
        for rank in self._watched:
            heartbeat, silence_s = self._heartbeats.get(rank), self._silence_s[rank]
            if rank == self._rank or (heartbeat is not None and heartbeat.kind == "left"):
                continue
            early = heartbeat is None or heartbeat.kind == "phase"
            limit_s = self._limits.phase_silence_s if early else self._limits.silence_s
            late_s = max((b.late_s for b in (own, heartbeat) if b is not None), default=0.0)
            if silence_s > self._limits.patience_s(limit_s, late_s):
                life = self._life(rank)
                if silence_s > self._limits.patience_s(limit_s, late_s, life):
                    return self._blame(
                        rank, f"has given no sign of life for {silence_s:.0f} s: it {LIFE[life]}{self._last_seen(rank)}"
                    )
        return None

    def _raised(self) -> Failure | None:
        """A worker whose script caught the error of a call, which it has not had in common with the others, and went on."""
        heard = self._heard_lately()
        for rank, heartbeat in self._heartbeats.items():
            own = heartbeat.calls
            if not own.raised or heartbeat.kind == "left":
                continue
            for other, of_other in self._heartbeats.items():
                calls = of_other.calls
                if other == rank or calls.raised >= own.raised or of_other.kind == "left":
                    continue
                went_on = calls.number > own.raised or (calls.number == own.raised and not calls.inside)
                age_s = min(heard[r].call_age_s if r in heard else 0.0 for r in (rank, other))
                computes = of_other.kind == "work" and of_other.state != BETWEEN_STEPS  # and may come to that error yet
                late_s = max(heartbeat.late_s, of_other.late_s)
                limit_s = self._limits.stuck_s if computes else self._limits.patience_s(self._limits.raised_s, late_s)
                if went_on or (calls.number == own.raised and calls.inside and age_s > limit_s):
                    return self._blame(
                        rank,
                        f"has had an error that the others have not: {own.error}; its script caught that and went on. What one rank alone "
                        "does cannot be undone on the others: let the error end the script, or raise it on every rank",
                    )
        return None

    def _parted(self) -> Failure | None:
        """Workers whose calls differ, also where those have ended, or who wait in one for a worker that has left."""
        here = {rank: heartbeat.calls for rank, heartbeat in self._heartbeats.items() if heartbeat.kind != "left"}
        for rank, calls in here.items():
            names = {other: heartbeat.calls.name_of(calls.number) for other, heartbeat in self._heartbeats.items()}
            if any(name not in ("", calls.latest) for name in names.values()):
                return self._calls_differ(names)
            if not calls.inside:
                continue
            gone = [
                r
                for r, heartbeat in self._heartbeats.items()
                if heartbeat.kind == "left" and heartbeat.calls.number < calls.number
            ]
            if gone:
                text = f"{_have(gone)} left, and rank {rank} waits in {calls.latest}; {_SAME_CALLS}"
                return Failure(rank=gone[0], host=self._members[gone[0]].host, text=text)
        return None

    def _calls_differ(self, names: Mapping[int, str]) -> Failure:
        known = {rank: name for rank, name in sorted(names.items()) if name}
        told = [
            f"{_are([rank for rank, other in known.items() if other == name])} in {name}"
            for name in dict.fromkeys(known.values())
        ]
        text = f"the ranks call different things: {'; '.join(told)}; {_SAME_CALLS}"
        return Failure(rank=None, host=None, text=text)

    def _stuck(self) -> Failure | None:
        """A worker that works longer than it may, while at least one other waits, and not only since just now: what a script does
        between two steps may take long, as long as it takes all workers alike."""
        heard = self._heard_lately()
        waits_s = {rank: heartbeat.age_s for rank, heartbeat in heard.items() if heartbeat.kind == "wait"}
        for rank, heartbeat in heard.items():
            age_s = heartbeat.age_s
            waited_s = max((s for other, s in waits_s.items() if other != rank), default=0.0)
            enough_s = min(heartbeat.limit_s, self._limits.stuck_s)
            if heartbeat.kind in {"work", "phase"} and age_s > heartbeat.limit_s and waited_s > enough_s:
                took = f"for {age_s:.0f} s (it may take {heartbeat.limit_s:.0f} s)"
                waiting = sorted(waits_s.keys() - {rank})
                who = f"while {_ranks(waiting)} for it in {heard[max(waiting, key=waits_s.__getitem__)].state}"
                if heartbeat.calls.number and not heartbeat.calls.inside:  # the user's own code, which may know better
                    where = f" in {heartbeat.state}" if heartbeat.kind == "phase" else ""
                    return self._blame(
                        rank, f"is busy outside of the calls of its trainer{where} {took} {who}: {_REMEDY}"
                    )
                return self._blame(rank, f"hangs in {heartbeat.state}: no progress {took} {who}")
        return None

    def _deadlocked(self) -> Failure | None:
        """All who are still there wait, longer than they may."""
        present = {rank: heartbeat for rank, heartbeat in self._heartbeats.items() if heartbeat.kind != "left"}
        if self._heard < len(self._members) or not present:
            return None
        heard = self._heard_lately()
        if not all(rank in heard and _waits_too_long(heard[rank]) for rank in present):
            return None
        states = "; ".join(f"rank {rank} in {heartbeat.state}" for rank, heartbeat in present.items())
        left = sorted(set(self._heartbeats) - set(present))
        behind = left[0] if left else min(present, key=lambda rank: present[rank].count)
        what = "left while the others wait for it" if left else "is furthest behind, and all wait for each other"
        return self._blame(behind, f"{what} ({states}): the network is cut, or the workers do not do the same things")

    def _heard_lately(self) -> dict[int, Heartbeat]:
        """Return the newest heartbeats, with ages as of now. Those of silent workers are left out: what these say that they do may have
        ended long ago, and `_silent` judges them.
        """
        return {
            rank: replace(b, age_s=b.age_s + silence_s, call_age_s=b.call_age_s + silence_s)
            for rank, b in self._heartbeats.items()
            if (silence_s := self._silence_s[rank]) <= self._limits.longest_round_s
        }

    def _blame(self, rank: int, happened: str) -> Failure:
        member = self._members[rank]
        return Failure(rank=rank, host=member.host, text=f"{member} {happened}")

    def _last_seen(self, rank: int) -> str:
        heartbeat = self._heartbeats.get(rank)
        return "" if heartbeat is None else f"; last seen in {heartbeat.state}"


_REMEDY = "around long work of one rank, as an upload, put 'with trainer.phase(\"uploading\", limit_s=3600):', and the others wait for it"
_SAME_CALLS = "they wait for each other in every call of a trainer, so all ranks make the same calls in the same order"


def _waits_too_long(heartbeat: Heartbeat) -> bool:
    return heartbeat.kind == "wait" and heartbeat.age_s > heartbeat.limit_s


def _ranks(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} waits" if len(ranks) == 1 else f"{_named(ranks)} wait"


def _have(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} has" if len(ranks) == 1 else f"{_named(ranks)} have"


def _are(ranks: Sequence[int]) -> str:
    return f"{_named(ranks)} is" if len(ranks) == 1 else f"{_named(ranks)} are"


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
