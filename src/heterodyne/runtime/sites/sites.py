"""One rank of a site: the outer steps that are due between two steps of training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from heterodyne.errors import JobError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.runtime.comm.agreement import Agreement
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.exact.weighting import NothingCountsError
from heterodyne.runtime.records.metrics import OuterStep
from heterodyne.runtime.sites.fragments import fragments_of
from heterodyne.runtime.sites.meeting import Meeting
from heterodyne.runtime.sites.server import MeetingServer
from heterodyne.runtime.sites.speaker import AtHome, Joined, Merged, Over, Speaker
from heterodyne.runtime.slices import GlobalBatchLike
from heterodyne.runtime.step_result import StepResult
from heterodyne.runtime.weights.trainable import trainable_parameters
from heterodyne.runtime.worker import Worker
from heterodyne.sync_section import SyncSection

__all__ = ["Sites", "require_apart", "terms_of"]

_LONGEST_S = 1800.0  # of bringing the largest models over slow links, besides waiting for others
_OWN = ("training.precision", "training.tf32", "training.sync", "training.sync.site")
"""Fields that may be others at each site; those of ``training.sync`` are compared one by one."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def require_apart(graph: ModelGraph, sync: SyncSection) -> None:
    """Raise JobError for a model that sites cannot train apart from each other."""
    if graph.batch_statistics:
        raise JobError(
            "training.sync: the model has BatchNorm, whose statistics are of the whole global batch, and sites see only their own part of "
            "it. Take GroupNorm or LayerNorm, or train without sync"
        )
    if graph.loss.reduction == "sum":
        raise JobError(
            "training.sync: the loss is a sum over the samples, so that the gradient of a site grows with its share, and a mean over sites "
            "does not give that of the whole batch. Let the loss be a mean"
        )
    trained = sum(parameter.trainable for parameter in graph.parameters)
    if sync.fragments > trained:
        raise JobError(
            f"training.sync.fragments is {sync.fragments}, and the model trains {trained} parameters: give fewer"
        )


def terms_of(job: Job, data: Mapping[str, str | int], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Return by field name the values that must be equal at all sites: what decides the losses of a job, what identifies its ``data``, and
    the ``shapes`` of the trained parameters.
    """
    decisive, sync = job.decisive, job.training.sync
    assert sync is not None
    sections = {
        "training": {**decisive["training"], "steps": job.training.steps},
        "training.sync": {
            **decisive["training"]["sync"],
            "shares": [list(share) for share in sync.shares.items()],  # in the order of the samples
        },
        "optimizer": decisive["optimizer"],
        "model.arguments": decisive["model"].get("arguments", {}),
        "data": data,
    }
    named = {f"{section}.{name}": value for section, of in sections.items() for name, value in of.items()}
    parameters = {f"the shape of {name!r}": list(shape) for name, shape in shapes.items()}
    return {name: value for name, value in (parameters | named).items() if name not in _OWN}


class Sites:
    """Keeps this site's weights together with those of the others. Every rank of the site calls every method but `close`, in one order.

    Args:
        worker: this rank's.
        job: of all sites, with ``training.sync.site``.
        data: what identifies it.
        secret: of all sites.
        say: takes lines for people, from rank 0.
        phase: entered, with words and seconds, around what takes long and is no step.
    """

    def __init__(
        self,
        worker: Worker,
        communicator: Communicator,
        agreement: Agreement,
        job: Job,
        data: Mapping[str, str | int],
        *,
        secret: bytes,
        say: Callable[[str], None],
        phase: Callable[[str, float], AbstractContextManager[Any]],
    ) -> None:
        sync, steps = job.training.sync, job.training.steps
        assert sync is not None
        assert sync.site is not None
        self._worker, self._communicator, self._ranks = worker, communicator, agreement
        self._sync, self._secret, self._say, self._phase = sync, secret, say, phase
        self._site = sync.site
        self._steps = sync.outer_steps(sync.site, steps)
        trained = trainable_parameters(worker.module, worker.graph)
        wide = next((name for name, parameter in trained.items() if parameter.dtype not in _TYPES), None)
        if wide is not None:
            raise JobError(f"training.sync: {wide} is {trained[wide].dtype}, and sites exchange weights in fp32")
        shapes = {name: tuple(worker.ownership.shapes[name]) for name in trained}
        self._fragments = fragments_of(shapes, sync.fragments)
        self._terms = terms_of(job, data, shapes)
        self._number = 0  # of the outer step that comes next
        self._due: int | None = None  # when what was brought to the one under way is waited for, in steps
        self._results: list[StepResult] = []  # whose counts are not summed up yet
        self._state: Mapping[str, Any] | None = None
        self._speaker: Speaker | None = None  # on rank 0, as the next two; these only where the sites meet
        self._meeting: Meeting | None = None
        self._server: MeetingServer | None = None
        self._noted: list[OuterStep] = []
        self._traffic = (0, 0)

    def begin(self) -> None:
        """Join the others, and take over the global weights."""
        every = "every " + (f"{self._steps.every} steps" if self._steps.every > 1 else "step")
        pieces = f" in {len(self._fragments)} fragments" if len(self._fragments) > 1 else ""
        self._say(
            f"INEXACT, as asked for (training.sync): site {self._site} has {self._sync.shares[self._site]} of "
            f"{sum(self._sync.shares.values())} samples, and takes over an outer average of the sites' weights {every}{pieces}, "
            f"{self._sync.bits} bits a number. The losses that are shown are those of this site"
        )
        self._number = next(
            number
            for number in range(self._steps.count + 1)
            if number == self._steps.count or self._steps.due(number) > self._worker.steps_done
        )
        if self._number < self._steps.count:
            self._join(first=True)
            self._do_due()

    def step(self, batch: GlobalBatchLike) -> StepResult:
        """Train on this site's share of a global batch. Where nothing in it counts, others may have what counts, so no error is raised."""
        try:
            return self._worker.step(batch)
        except NothingCountsError:
            number = self._worker.steps_done
            self._worker.state.steps_done = number + 1
            rate = float(self._worker.optimizer.param_groups[0]["lr"])
            self._say(
                f"step {number + 1}: no sample of this site's share of the global batch has a label that the loss counts, so nothing is "
                "updated here, and its loss is not a number"
            )
            return StepResult(step=number, told=math.nan, lr=rate, samples=0, count=0.0, seconds=0.0)

    def after(self, result: StepResult) -> None:
        """Do what is due after a step."""
        if self._ranks.rank == 0:
            self._results.append(result)
        self._do_due()

    def _do_due(self) -> None:
        """Take part in the outer steps that are due."""
        steps = self._steps.steps
        if self._due is not None and self._worker.steps_done >= min(self._due, steps):
            self._end()
        count, due = self._steps.count, self._steps.due
        while self._due is None and self._number < count and due(self._number) <= self._worker.steps_done:
            self._bring()
            if not self._sync.delay or self._worker.steps_done >= steps:
                self._end()
        if self._worker.steps_done >= steps:
            self._finish()

    def settle(self) -> None:
        """Wait for the outer step that is under way, so that what was brought to it and what is kept in a checkpoint go together."""
        if self._due is not None:
            self._end()

    def notes(self) -> list[OuterStep]:
        """Return what was not asked for yet of outer steps, on rank 0."""
        noted, self._noted = self._noted, []
        return noted

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, on rank 0, nothing on the others; `settle` comes before it."""
        if self._speaker is None:
            return {}
        self._count()
        meeting = {} if self._meeting is None else {"meeting": self._meeting.state_dict()}
        return {"speaker": self._speaker.state_dict(), **meeting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there when it begins."""
        self._state = state

    def close(self) -> None:
        """Leave the others."""
        if self._speaker is not None:
            self._speaker.close()
        if self._server is not None:
            self._server.close()

    def _bring(self) -> None:
        """Give what this site has earned to the outer step that is next."""
        fragment = self._steps.fragment(self._number)
        rows = self._rows([fragment])
        self._due = self._worker.steps_done + self._sync.delay

        def begin() -> None:
            assert self._speaker is not None
            self._count()
            self._speaker.begin(self._number, fragment, rows[0])

        self._ranks.only_on_rank0(begin)

    def _end(self) -> None:
        """Take over what has come of the outer step under way."""
        self._due = None
        started_s = time.monotonic()
        with self._phase("an outer step with the other sites", self._sync.grace_s + _LONGEST_S):
            came = self._ranks.on_rank0(lambda: None if self._speaker is None else self._speaker.end())
        fragment = self._steps.fragment(self._number)
        if isinstance(came, Merged):
            self._take([fragment], 1.0 if self._steps.is_last(self._number) else self._sync.taken_over)
            self._note(came, fragment, time.monotonic() - started_s)
            self._number += 1
        elif came is None:
            self._join(first=False)
        else:
            self._number += 1

    def _join(self, *, first: bool) -> None:
        rows = self._rows(range(len(self._fragments)))

        def join() -> Joined | None:
            if self._speaker is None:
                self._open(rows)
            assert self._speaker is not None
            self._count()
            try:
                return (self._speaker.join_at_last if first else self._speaker.join)(self._number, rows)
            except (EOFError, OSError):
                return None

        with self._phase("meeting the other sites", self._sync.start_s + _LONGEST_S):
            joined = self._ranks.on_rank0(join)
        if joined is None:  # tried again at the next outer step
            self._number += 1
            return
        self._take(range(len(self._fragments)), 1.0)
        done, before, self._number = self._worker.steps_done, self._number, joined.number
        last, due = self._steps.due(joined.number - 1), self._steps.due(joined.number)
        step = min(last + int(joined.elapsed * (due - last)), max(last, due - 1))  # what is due next was not done yet
        if joined.number == before:
            step = max(step, done)
        if step != done:
            where = "further" if step > done else "not so far yet"
            self._say(f"the other sites are {where}: going on after step {step} with their weights")
            self._worker.state.steps_done = step

    def _finish(self) -> None:
        def finish() -> None:
            if self._meeting is not None:
                self._meeting.finish()

        with self._phase("waiting for sites that come late", self._sync.grace_s + _LONGEST_S):
            self._ranks.only_on_rank0(finish)

    def _open(self, rows: Sequence[Tensor]) -> None:
        """On rank 0: make the meeting, where this site keeps it, and the way there."""
        state = self._state or {}
        way: AtHome | Over
        if self._site == self._sync.keeper:
            self._meeting = Meeting(self._sync, rows, steps=self._steps, terms=self._terms, say=self._say)
            if "meeting" in state:
                self._meeting.load_state_dict(state["meeting"])
            self._server = MeetingServer(self._meeting, self._sync.address, secret=self._secret, say=self._say)
            way = AtHome(self._meeting)
        else:
            place = list(self._sync.shares).index(self._site)
            way = Over(self._sync.address, secret=self._secret, place=place)
        self._speaker = Speaker(self._sync, self._fragments, rows, way, terms=self._terms, say=self._say)
        if "speaker" in state:
            self._speaker.load_state_dict(state["speaker"])

    def _rows(self, fragments: Sequence[int]) -> list[Tensor]:
        """Return the weights of these fragments on rank 0, nothing on the others."""
        found = []
        for number in fragments:
            fragment = self._fragments[number]
            values = self._worker.state.updated(fragment.names)
            if self._ranks.rank == 0:
                found.append(fragment.row(values))
        return found

    def _take(self, fragments: Sequence[int], part: float) -> None:
        """Let all ranks go ``part`` of the way from their weights to the global ones."""
        with self._worker.state.lent():
            for number in fragments:
                fragment = self._fragments[number]
                row = torch.empty(fragment.size) if self._speaker is None else self._speaker.given[number].clone()
                self._communicator.control.broadcast(row, 0)
                values = fragment.values(row)
                if part < 1:
                    own = self._worker.state.updated(fragment.names)
                    values = {
                        n: torch.lerp(own[n].to("cpu", torch.float32), value, part) for n, value in values.items()
                    }
                self._worker.state.put(values)

    def _count(self) -> None:
        """Sum up what the steps since have counted; those that were skipped have earned nothing."""
        assert self._speaker is not None
        for result in self._results:
            self._speaker.count(0.0 if result.fault is not None else result.count)
        self._results.clear()

    def _note(self, merged: Merged, fragment: int, wait_s: float) -> None:
        if self._speaker is None:
            return
        way = self._speaker.way
        sent, received = (way.sent, way.received) if self._server is None else (self._server.went, self._server.came)
        before, self._traffic = self._traffic, (sent, received)
        total = sum(merged.weights.values()) or 1.0  # nothing was trained since, at the end
        self._noted.append(
            OuterStep(
                step=self._worker.steps_done,
                outer_step=merged.number + 1,
                fragment=fragment,
                sites=", ".join(f"{name} {weight / total:.1%}" for name, weight in merged.weights.items()),
                sent_bytes=sent - before[0],
                received_bytes=received - before[1],
                wait_s=wait_s,
                time_s=time.time(),
            )
        )
