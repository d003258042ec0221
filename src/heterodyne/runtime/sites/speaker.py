"""What rank 0 of a site has of the meeting: the global weights that it was given last, what the site has earned since, the way there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from heterodyne.errors import NumericsError, WorkerError
from heterodyne.processes.signals import is_stop_requested
from heterodyne.runtime.rendezvous.gateway import keep_alive
from heterodyne.runtime.rendezvous.run_secret import HandshakeError, SecretError, as_client
from heterodyne.runtime.sites.fragments import Fragment
from heterodyne.runtime.sites.frames import STALLED_S, Message, read_message, write_message
from heterodyne.runtime.sites.meeting import Meeting
from heterodyne.runtime.sites.packing import packed, unpacked
from heterodyne.secret_names import SECRET_VARIABLE
from heterodyne.sync_section import SyncSection

__all__ = ["AtHome", "Joined", "Merged", "Over", "Speaker", "Way"]

_CONNECT_S = 10.0
_AGAIN_S = 1.0
_LOOK_S = 0.1


class Way(Protocol):
    """A way to the meeting. ``sent``, ``received``: bytes."""

    sent: int
    received: int
    told: bool
    """Whether the latest message may have come there."""

    def ask(self, message: Message, *, within_s: float) -> Message:
        """Return the answer, which begins to come within so many seconds. Raises OSError and EOFError where there is none."""

    def leave(self) -> None:
        """Let `ask`, in another thread, end now."""


class AtHome:
    """The meeting is in this process."""

    told = True

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.sent = self.received = 0

    def ask(self, message: Message, *, within_s: float) -> Message:
        del within_s
        return self._meeting.answer(message)

    def leave(self) -> None:
        self._meeting.close()


class Over:
    """The meeting is at an address: a connection for each message, so that nothing has to be kept open in between."""

    def __init__(self, address: tuple[str, int], *, secret: bytes, place: int) -> None:
        self._address, self._secret, self._place = address, secret, place
        self.sent = self.received = 0
        self.told = False
        self._end: Callable[[], object] = lambda: None

    def ask(self, message: Message, *, within_s: float) -> Message:
        try:
            return asyncio.run(self._asked(message, within_s))
        except asyncio.CancelledError as error:
            raise ConnectionError("this site was asked to stop") from error

    def leave(self) -> None:
        self._end()

    async def _asked(self, message: Message, within_s: float) -> Message:
        self.told = False
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._end = lambda: loop.is_closed() or loop.call_soon_threadsafe(task.cancel)
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(*self._address)
        try:
            keep_alive(writer.get_extra_info("socket"))
            try:
                async with asyncio.timeout(_CONNECT_S):
                    key = await as_client(reader, writer, self._secret, self._place)
                self.told = True
                self.sent += await write_message(writer, message, key, "site")
                answer, received = await read_message(reader, key, "meeting", within_s=within_s + STALLED_S)
            except SecretError as error:
                if self.received:  # it was the same secret before: the meeting has ended in the middle of this
                    raise ConnectionError(str(error)) from error
                host, port = self._address
                raise WorkerError(
                    f"the meeting of the sites at {host}:{port}: {error}. Set {SECRET_VARIABLE} to the same long random text at all sites "
                    "(what `openssl rand -hex 32` prints)"
                ) from error
            except HandshakeError as error:
                raise ConnectionError(str(error)) from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        self.received += received
        return answer


@dataclass(frozen=True)
class Joined:
    """The site is among the others: ``number`` of the outer step that comes next, and which part of the way to it they have gone."""

    number: int
    elapsed: float


@dataclass(frozen=True)
class Merged:
    """An outer step was done: how much each site has counted in it."""

    number: int
    weights: Mapping[str, float]


class Speaker:
    """Speaks for a site.

    Args:
        weights: a row for each fragment, as training begins.
        terms: see `Meeting`.

    ``given``: the global weights, a row for each fragment, as this site has them. How counts are kept: see the module of the meeting.
    """

    def __init__(
        self,
        sync: SyncSection,
        fragments: Sequence[Fragment],
        weights: Sequence[Tensor],
        way: Way,
        *,
        terms: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._sync, self._fragments, self.way, self._terms, self._say = sync, fragments, way, dict(terms), say
        self.given = list(weights)
        self._versions = [0] * len(fragments)
        self._accounts: list[Mapping[str, float]] = [{} for _ in fragments]  # that came with these versions
        self._left_out = [torch.zeros(0) for _ in fragments]  # of the last pseudo-gradient, by rounding
        self._until = [0.0] * len(fragments)  # what the losses of this site have counted in all, by fragment
        self._since = [0.0] * len(fragments)  # the same when it had the weights that are given
        self._brought: list[dict[float, tuple[Tensor, Tensor]]] = [{} for _ in fragments]
        """By count, weights and what rounding has left out, where no answer told what came of them."""
        self._visit = ""
        self._thread = ThreadPoolExecutor(1, "heterodyne-site")
        self._asked: Future[Message] | None = None
        self._unheard = 0  # outer steps in a row that nobody was reached for

    def count(self, counted: float) -> None:
        """Note what the losses of a step have counted."""
        self._until = [until + counted for until in self._until]

    def join(self, number: int, rows: Sequence[Tensor]) -> Joined:
        """Join the others, bring what was earned, and take over all global weights. Raises OSError, WorkerError.

        Args:
            number: of the outer step that would be next here.
            rows: the weights of this site.
        """
        site = self._sync.site
        there = self._ask({"what": "ask", "site": site, "terms": self._terms}, [])
        ours = [f for f, version in enumerate(there["versions"]) if self._versions[f] > version]
        brought: dict[int, tuple[bytes, Tensor]] = {}
        since = list(self._since)
        for f, row in enumerate(rows):
            known = max(there["known"][f], self._accounts[f].get(str(site), 0.0) if f in ours else 0.0)
            if known <= since[f]:
                given = self.given[f], self._left_out[f]
            elif known in self._brought[f]:  # that was heard, and only its answer was lost
                given, since[f] = self._brought[f][known], known
            else:
                if known < self._until[f]:
                    self._say(
                        f"of what site {site} brings the others have a part that it does not know: it is left out"
                    )
                continue
            if self._until[f] > since[f]:
                brought[f] = self._gradient(f, row, *given)
        head = {
            "what": "join",
            "site": site,
            "number": number,
            "versions": self._versions,
            "accounts": [dict(account) for account in self._accounts],
            "globals": ours,
            "earned": list(brought),
            "since": since,
            "until": self._until,
        }
        gradients = [row for row, _ in brought.values()]
        rows_of_all = [*(packed(self.given[f], 32) for f in ours), *gradients]
        answer = self._waited(self._sent(Message(head, rows_of_all), self._sync.start_s))
        joined = answer.head
        self._visit, self._unheard = joined["visit"], 0
        self._versions, self._accounts = list(joined["versions"]), list(joined["accounts"])
        self.given = [unpacked(row, rows[f].numel(), 32) for f, row in enumerate(answer.rows)]
        for fragment, (_, left_out) in brought.items():
            self._left_out[fragment] = left_out
        self._since, self._until = list(joined["known"]), list(joined["known"])
        self._brought = [{} for _ in rows]
        return Joined(joined["number"], joined["elapsed"])

    def join_at_last(self, number: int, rows: Sequence[Tensor]) -> Joined:
        """As `join`, at the beginning: the meeting may begin after this site. Raises WorkerError, OSError once asked to stop."""
        until, said = time.monotonic() + self._sync.start_s, False
        while True:
            try:
                return self.join(number, rows)
            except (EOFError, OSError) as error:
                if is_stop_requested():
                    raise
                where = "training.sync.at " + self._sync.at
                if time.monotonic() > until:
                    raise WorkerError(
                        f"site {self._sync.site} found nobody at {where} within {self._sync.start_s:g} s ({_why(error)}): start site "
                        f"{self._sync.keeper} there, and open that port"
                    ) from error
                if not said:
                    self._say(f"waiting for site {self._sync.keeper} at {where} ({_why(error)})")
                    said = True
                time.sleep(_AGAIN_S)

    def begin(self, number: int, fragment: int, row: Tensor) -> None:
        """Bring what was earned to an outer step; `end` waits for what comes of it. Raises NumericsError."""
        data, left_out = self._gradient(fragment, row, self.given[fragment], self._left_out[fragment])
        until = self._until[fragment]
        head = {
            "what": "step",
            "site": self._sync.site,
            "visit": self._visit,
            "number": number,
            "version": self._versions[fragment],
            "since": self._since[fragment],
            "until": until,
        }
        self._under_way = fragment, until
        self._brought[fragment][until] = row, left_out
        self._asked = self._sent(Message(head, [data]), self._sync.grace_s)

    def end(self) -> Merged | OSError | None:
        """Return what came of `begin`: None where the others have gone on and this site has to join again, OSError where nobody was
        reached.

        Raises WorkerError where the site is refused.
        """
        assert self._asked is not None
        asked, self._asked = self._asked, None
        fragment, until = self._under_way
        try:
            answer = self._waited(asked)
        except (EOFError, OSError) as error:
            if is_stop_requested():
                self._say("stopping: what this site has earned since the last outer step is brought when it is resumed")
                return OSError(_why(error))
            if not self.way.told:
                del self._brought[fragment][until]
            self._unheard += 1
            if self._unheard == 1:
                self._say(
                    f"the meeting of the sites at {self._sync.at} is not reached ({_why(error)}): this site trains on alone, and brings "
                    "what it has earned once it is"
                )
            return OSError(_why(error))
        if answer.head.get("behind"):
            return None
        if self._unheard:
            self._say(f"the meeting of the sites is reached again, after {self._unheard} outer steps")
            self._unheard = 0
        size = self.given[fragment].numel()
        if answer.head["whole"]:
            self.given[fragment] = unpacked(answer.rows[0], size, 32)
        else:
            self.given[fragment] = self.given[fragment] + unpacked(answer.rows[0], size, self._sync.bits)
        self._versions[fragment], self._accounts[fragment] = answer.head["version"], answer.head["account"]
        self._left_out[fragment], self._since[fragment] = self._brought[fragment][until][1], until
        self._brought[fragment].clear()
        return Merged(answer.head["number"], answer.head["weights"])

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {
            "given": list(self.given),
            "visit": self._visit,
            "versions": list(self._versions),
            "accounts": [dict(account) for account in self._accounts],
            "left_out": list(self._left_out),
            "until": list(self._until),
            "since": list(self._since),
            "brought": [[[until, *of] for until, of in each.items()] for each in self._brought],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.given, self._visit, self._versions = list(state["given"]), str(state["visit"]), list(state["versions"])
        self._accounts, self._left_out = list(state["accounts"]), list(state["left_out"])
        self._until, self._since = list(state["until"]), list(state["since"])
        self._brought = [{until: (row, left_out) for until, row, left_out in each} for each in state["brought"]]

    def close(self) -> None:
        """Wait for nothing any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _gradient(self, fragment: int, row: Tensor, given: Tensor, left_out: Tensor) -> tuple[bytes, Tensor]:
        """Return the pseudo-gradient since the weights were ``given``, as it is sent, and what rounding leaves out of it."""
        gradient = given - row
        if not gradient.isfinite().all():
            names = ", ".join(list(self._fragments[fragment].names)[:3])
            raise NumericsError(
                f"the weights of site {self._sync.site} are not finite (among {names}): they are not brought to the others"
            )
        if self._sync.bits == 32:
            return packed(gradient, 32), left_out
        if left_out.numel():
            gradient = gradient + left_out
        data = packed(gradient, self._sync.bits)
        return data, gradient - unpacked(data, gradient.numel(), self._sync.bits)

    def _ask(self, head: Mapping[str, Any], rows: Sequence[bytes]) -> Mapping[str, Any]:
        """Return the head of the answer to what is answered at once."""
        return self._waited(self._sent(Message(dict(head), rows), _CONNECT_S)).head

    def _sent(self, message: Message, within_s: float) -> Future[Message]:
        return self._thread.submit(self.way.ask, message, within_s=within_s)

    def _waited(self, asked: Future[Message]) -> Message:
        """Return the answer, unless this process is asked to stop before it comes.

        Raises as `Way.ask` does, and WorkerError where this site is refused.
        """
        while not asked.done():
            if is_stop_requested():
                self.way.leave()
                raise ConnectionError("this site was asked to stop")
            wait((asked,), timeout=_LOOK_S)
        answer = asked.result()
        refused = answer.head.get("refused")
        if refused is not None:
            raise WorkerError(str(refused))
        return answer


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
