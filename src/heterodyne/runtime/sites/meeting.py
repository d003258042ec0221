"""Where sites meet: the global weights, the outer SGD on them, and who takes part in which outer step.

An outer step is done once all sites that are there have come to it, or `grace_s` seconds after the first has. Who has not come by then is
not waited for any more, until it joins again. What a site has earned while it was away is not lost: its pseudo-gradient since the last
global weights that it had goes into the next outer step of each fragment, with the weight of all that its losses have counted since.

What is lost on the way, or done again from a checkpoint, counts once. Each site sums up what its losses have counted since training began,
and sends a pseudo-gradient with that sum at its beginning and at its end. Each fragment of the global weights has an account: by site, the
sum up to which they contain its work. What begins before that sum is contained already.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from heterodyne.runtime.sites.frames import Message
from heterodyne.runtime.sites.packing import packed, unpacked
from heterodyne.sync_section import OuterSteps, SyncSection

__all__ = ["ClosedError", "Meeting"]


class ClosedError(ConnectionError):
    """The meeting has ended."""


@dataclass(frozen=True)
class _Earned:
    """What a site brings: the pseudo-gradient of what it did while its losses counted from ``since`` to ``until``."""

    site: str
    since: float
    until: float
    gradient: Tensor

    @property
    def weight(self) -> float:
        return self.until - self.since


@dataclass(frozen=True)
class _Global:
    """A fragment of the global weights.

    Args:
        exact: what the outer SGD updates.
        told: what the sites have: with fewer than 32 bits a step behind ``exact`` by what rounding leaves out, which goes into the next.
        momentum: of the outer SGD.
        version: of how many outer steps of the fragment it is.
        account: up to which count it has the work of each site; of those that are not there it has none.
    """

    exact: Tensor
    told: Tensor
    momentum: Tensor
    version: int = 0
    account: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Member:
    """A site. ``visit``: of its joining, another one for each process; ``had``: the version of each fragment that it was given last."""

    visit: str = ""
    there: bool = False
    had: list[int] = field(default_factory=list)


class Meeting:
    """Answers the messages of sites, each in a thread of its own.

    Args:
        weights: a row for each fragment, as training begins.
        steps: of the outer steps, those of the first site.
        terms: what all sites must have alike, as plain JSON values.
        say: takes lines for people, from any thread.
    """

    def __init__(
        self,
        sync: SyncSection,
        weights: Sequence[Tensor],
        *,
        steps: OuterSteps,
        terms: Mapping[str, Any],
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._sync, self._steps, self._terms, self._say = sync, steps, dict(terms), say
        self._global = [_Global(row, row, torch.zeros_like(row)) for row in weights]
        self._members = {name: _Member(had=[-1] * len(weights)) for name in sync.shares}
        self._pools: list[list[_Earned]] = [[] for _ in weights]
        self._number = 0  # of the outer step that comes next
        self._came: set[str] = set()  # the sites that have brought their part of it
        self._first_s: float | None = None  # when the first of them came
        self._done: dict[int, tuple[int, dict[str, float], bytes]] = {}
        """Of each fragment the number of its last outer step, who took part in it, and its update."""
        self._begun = False
        self._joining_s: float | None = None
        self._last_s, self._took_s = time.monotonic(), 0.0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def sites(self) -> int:
        """Return how many can come."""
        return len(self._members)

    def answer(self, message: Message) -> Message:
        """Return what a site is told; blocks until it can be. Raises ClosedError."""
        with self._changed:
            refused = self._refused(message.head)
            if refused is not None:
                self._say(f"site {message.head['site']} is refused: {refused}")
                return Message({"refused": refused})
            try:
                return {"ask": self._ask, "join": self._join, "step": self._outer_step}[message.head["what"]](message)
            finally:
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait until every site has been given the last weights, at most `grace_s`."""
        with self._changed:
            last = [each.version for each in self._global]
            self._changed.wait_for(
                lambda: self._closed or all(member.had == last for member in self._members.values()),
                self._sync.grace_s,
            )

    def close(self) -> None:
        """End what waits here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes. From any thread; tensors are never changed in place."""
        with self._changed:
            return {
                "members": {name: {"visit": m.visit, "had": list(m.had)} for name, m in self._members.items()},
                "global": [dict(vars(each)) for each in self._global],
                "earned": [[dict(vars(each)) for each in pool] for pool in self._pools],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        with self._changed:
            self._global = [_Global(**each) for each in state["global"]]
            self._pools = [[_Earned(**each) for each in pool] for pool in state["earned"]]
            for name, member in state["members"].items():
                self._members[name] = _Member(visit=member["visit"], had=list(member["had"]))

    def _refused(self, head: Mapping[str, Any]) -> str | None:
        """Return why this site cannot take part, in words; None if it can."""
        site = head["site"]
        if site not in self._members:
            return f"there is no site {site!r}: training.sync.shares of site {self._sync.keeper} has {', '.join(self._members)}"
        if head["what"] == "join":
            return None
        if head["what"] == "step":
            if self._members[site].there and self._members[site].visit != head["visit"]:
                return f"another process has joined as site {site} since: end one of them, or give each its own --site"
            return None
        theirs = head["terms"]
        for name in (*self._terms, *theirs):
            own, other = self._terms.get(name, "missing"), theirs.get(name, "missing")
            if own != other:
                return f"{name} is {other} at site {site}, and {own} at site {self._sync.keeper}: give all sites the same job"
        return None

    def _ask(self, message: Message) -> Message:
        """Tell a site what is here, so that it brings what is not."""
        site = message.head["site"]
        return Message(
            {
                "versions": [each.version for each in self._global],
                "known": [self._known(fragment, site) for fragment in range(len(self._global))],
            }
        )

    def _join(self, message: Message) -> Message:
        """Take what a site has earned, and give it all global weights. At the beginning all sites wait for each other here."""
        head, site = message.head, message.head["site"]
        member, rows = self._members[site], iter(message.rows)
        # The first site may have been resumed from a checkpoint older than the global weights that this site has.
        for fragment in head["globals"]:
            version, told = head["versions"][fragment], unpacked(next(rows), self._global[fragment].told.numel(), 32)
            if version > self._global[fragment].version:
                account = head["accounts"][fragment]
                of = replace(self._global[fragment], exact=told, told=told, version=version, account=account)
                self._global[fragment] = of
                pool = self._pools[fragment]
                self._pools[fragment] = [each for each in pool if each.since >= account.get(each.site, 0.0)]
        for fragment in head["earned"]:  # in the order of the rows
            since, until, row = head["since"][fragment], head["until"][fragment], next(rows)
            if since >= self._known(fragment, site):
                self._take(fragment, site, since, until, row)
        member.visit = visit = secrets.token_hex(8)
        member.there = True
        self._came.discard(site)  # a process of it that is gone
        if not self._came:
            self._first_s = None
        self._joining_s = self._joining_s or time.monotonic()
        self._changed.notify_all()
        if not self._begun:
            self._number = max(self._number, head["number"])
            self._wait(
                lambda: self._begun or all(each.there for each in self._members.values()),
                self._joining_s + self._sync.start_s,
            )
            if not self._begun:
                self._begun, self._last_s = True, time.monotonic()
                self._say_absent("training begins without")
        elif site != self._sync.keeper:
            self._say(f"site {site} has joined")
        member.had = [each.version for each in self._global]
        return Message(
            {
                "number": self._number,
                "visit": visit,
                "versions": member.had,
                "accounts": [dict(each.account) for each in self._global],
                "known": [self._known(fragment, site) for fragment in range(len(self._global))],
                "elapsed": min(1.0, (time.monotonic() - self._last_s) / self._took_s) if self._took_s else 0.0,
            },
            [packed(each.told, 32) for each in self._global],
        )

    def _outer_step(self, message: Message) -> Message:
        head, member = message.head, self._members[message.head["site"]]
        site, number = head["site"], head["number"]
        fragment = self._steps.fragment(number)
        before = self._global[fragment].version
        if not member.there or number != self._number or head["since"] != self._known(fragment, site):
            return Message({"behind": True})
        self._take(fragment, site, head["since"], head["until"], message.rows[0])
        self._came.add(site)
        self._first_s = self._first_s or time.monotonic()
        self._changed.notify_all()
        until = self._first_s + self._sync.grace_s

        def complete() -> bool:
            return all(name in self._came for name, each in self._members.items() if each.there)

        self._wait(lambda: self._number > number or member.visit != head["visit"] or complete(), until)
        if member.visit != head["visit"]:
            return Message({"behind": True})  # to a process that is gone
        if self._number == number:
            self._do()
        done, took_part, update = self._done.get(fragment, (-1, {}, b""))
        if done != number:
            return Message({"behind": True})  # others have gone on while this one waited for its turn to speak
        now = self._global[fragment]
        whole = self._sync.bits == 32 or head["version"] != before
        return Message(
            {
                "number": number,
                "whole": whole,
                "weights": took_part,
                "version": now.version,
                "account": dict(now.account),
            },
            [packed(now.told, 32) if whole else update],
        )

    def _known(self, fragment: int, site: str) -> float:
        """Return up to which count the work of a site is here, in the global weights or for the next outer step."""
        waiting = (each.until for each in self._pools[fragment] if each.site == site)
        return max(self._global[fragment].account.get(site, 0.0), max(waiting, default=0.0))

    def _take(self, fragment: int, site: str, since: float, until: float, row: bytes) -> None:
        """Keep what a site has earned for the next outer step of a fragment."""
        gradient = unpacked(row, self._global[fragment].told.numel(), self._sync.bits)
        self._pools[fragment].append(_Earned(site, since, until, gradient))

    def _do(self) -> None:
        """Do the outer step that is next, with what there is."""
        fragment, now = self._steps.fragment(self._number), time.monotonic()
        pool = sorted(self._pools[fragment], key=lambda each: each.site)
        of = self._global[fragment]
        total = sum(each.weight for each in pool)
        exact, momentum = of.exact, of.momentum
        if total:
            gradient = torch.zeros_like(exact)
            for each in pool:
                gradient.add_(each.gradient, alpha=each.weight / total)
            momentum = gradient if not self._sync.momentum else momentum * self._sync.momentum + gradient
            step = gradient + self._sync.momentum * momentum if self._sync.nesterov else momentum
            exact = exact - self._sync.lr * step
        update, told = b"", exact
        if self._sync.bits < 32:
            update = packed(exact - of.told, self._sync.bits)
            told = of.told + unpacked(update, exact.numel(), self._sync.bits)
        took_part = {
            name: sum(each.weight for each in pool if each.site == name)
            for name in self._members
            if any(each.site == name for each in pool)
        }
        self._done[fragment] = self._number, took_part, update
        account = {**of.account, **{each.site: self._known(fragment, each.site) for each in pool}}
        self._pools[fragment] = []
        self._global[fragment] = _Global(exact, told, momentum, of.version + 1, account)
        for name, member in self._members.items():
            if name in self._came:
                member.had[fragment] = of.version + 1
            elif member.there:
                member.there = False
                self._say(
                    f"site {name} did not come within {self._sync.grace_s:g} s: outer step {self._number + 1} is done without it"
                )
        self._number += 1
        self._came, self._first_s = set(), None
        self._took_s, self._last_s = now - self._last_s, now
        self._changed.notify_all()

    def _wait(self, come: Callable[[], bool], until_s: float) -> None:
        """Wait until so, or until then. Raises ClosedError."""
        self._changed.wait_for(lambda: self._closed or come(), max(0.0, until_s - time.monotonic()))
        if self._closed:
            raise ClosedError

    def _say_absent(self, words: str) -> None:
        absent = [name for name, member in self._members.items() if not member.there]
        if absent:
            self._say(f"{words} {', '.join(absent)}, which did not join within {self._sync.start_s:g} s")
