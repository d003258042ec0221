"""A rehearsal: the plans that are predicted to be nearly the fastest are run for a few steps, and the clock decides.

A prediction is right to a few percent, and the best plans of a search are often closer together than that. What is rehearsed works on
copies of the model; weights, optimizer and data of the run are not touched.

Plans that a prediction cannot tell apart differ by a few percent of a step. A rehearsal takes no larger part of a training whose length is
known, unless seconds were asked for.

Plans take turns of several steps. The first step of a turn does not count: it finds the caches full of what another plan has left, and
in training each step follows another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from heterodyne.api.session import Session
from heterodyne.plan.plan import Plan
from heterodyne.runtime.worker import Worker
from heterodyne.search.contenders import LEAST_TURNS, near_the_chosen, nothing_new, still_in, told_apart
from heterodyne.search.planned import Planned, Rehearsed, identity
from heterodyne.units import format_seconds

__all__ = ["rehearse"]

_MOST_PLANS = 6
_MOST_TURNS = 40
_TURN_S = 0.3
"""A device that is held to a part of a processor may use it at the begin of each period, and the usual one lasts 0.1 s."""
_LONGEST_S = 30.0
"""Of a training of unknown length."""
_PART = 0.05
"""Of the training."""
_MEMORY = 0.8
"""Of each device: what plans that take turns may fill together."""

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Program:
    """What is to be run, as rank 0 has found it. ``steps``: of a turn that count; ``beside``: all of the plans fit into memory at once; if
    they do not, each is made again for some turns; ``least_s``: about the seconds of the fewest turns of one of them.
    """

    plans: tuple[str, ...]
    steps: int = 1
    beside: bool = False
    budget_s: float = 0.0
    least_s: float = 0.0


def rehearse(
    session: Session,
    planned: Planned | None,
    make: Callable[[Plan], Worker],
    batch: Batch,
    *,
    budget_s: float | Literal["auto"],
    training_steps: int | None = None,
) -> Mapping[str, Rehearsed]:
    """Return what was seen of each plan that was run, by its `identity`; empty where there is nothing to tell apart, or no time for it.

    Args:
        planned: on rank 0.
        make: a worker on a copy of the model. Collective.
        batch: a global batch.
        budget_s: about the seconds that it may take; ``auto``: a part of the training.
        training_steps: of all training, None where that is not known.

    Collective. The same on every rank.
    """
    program = session.communicator.broadcast_object(_program(session, planned, budget_s, training_steps), 0)
    if not program.plans:
        return {}
    plans = [Plan.parse(text) for text in program.plans]
    with session.announced(f"rehearsing {len(plans)} plans, for about {format_seconds(program.budget_s)} at most"):
        taken = _Stage(session=session, plans=plans, make=make, batch=batch, program=program).in_turns()
    found = {identity(plan): seen for plan, seen in zip(plans, told_apart(taken), strict=False)} if taken else {}
    return session.communicator.broadcast_object(found, 0)


def _program(
    session: Session, planned: Planned | None, asked_s: float | Literal["auto"], training_steps: int | None
) -> _Program:
    nothing = _Program(plans=())
    if planned is None or session.world_size < 2 or nothing_new(planned):
        return nothing
    step_s = planned.chosen.step_s or _TURN_S
    steps = max(1, round(_TURN_S / step_s))
    worth_s = _LONGEST_S if training_steps is None else min(_LONGEST_S, _PART * training_steps * step_s)
    budget_s = worth_s if asked_s == "auto" else asked_s
    least_s = step_s * (1 + steps) * LEAST_TURNS
    most = min(_MOST_PLANS, int(budget_s / (least_s + step_s)))  # the first step of all makes what the others use
    near = near_the_chosen(planned, most) if most > 1 else ()
    plans = tuple(candidate.plan.dump() for candidate in near if candidate.plan is not None)
    used = [candidate.simulation.peak_bytes for candidate in near if candidate.simulation is not None]
    rooms = [device.memory_bytes for device in session.cluster.devices]
    beside = all(sum(of_rank) <= _MEMORY * room for of_rank, room in zip(zip(*used, strict=True), rooms, strict=False))
    if len(plans) < 2:
        return nothing
    return _Program(plans=plans, steps=steps, beside=beside, budget_s=budget_s, least_s=least_s)


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Where plans are run. Everything is collective."""

    session: Session
    plans: Sequence[Plan]
    make: Callable[[Plan], Worker]
    batch: Batch
    program: _Program

    def in_turns(self) -> list[list[float]]:
        """Seconds of a step of each plan, turn after turn, until one is left or the time is over.

        The first ones of the plans, if making them takes so long that there is no time for all; none, if there is none for two.
        """
        started_s, beside, budget_s = time.perf_counter(), self.program.beside, self.program.budget_s
        with ExitStack() as stack, torch.random.fork_rng(devices=[]):
            workers = self._workers(started_s, stack) if beside else []
            taken: list[list[float]] = [[] for _ in (workers if beside else self.plans)]
            if len(taken) < 2:
                return []
            while (turns := max(map(len, taken))) < _MOST_TURNS:
                late = turns >= LEAST_TURNS and time.perf_counter() - started_s > budget_s
                left = self.session.communicator.broadcast_object([] if late else still_in(taken), 0)
                if len(left) < 2:
                    break
                for place in left:
                    if beside:
                        taken[place].append(self._turn_s(workers[place]))
                    else:
                        with ExitStack() as alone:
                            worker = self._made(self.plans[place], alone)
                            taken[place] += [self._turn_s(worker) for _ in range(LEAST_TURNS)]
        return taken

    def _workers(self, started_s: float, stack: ExitStack) -> list[Worker]:
        """Return the workers of as many plans as there is time to run, if each one more takes as long to make as those before."""
        workers: list[Worker] = []
        for number, plan in enumerate(self.plans, 1):
            spent_s = time.perf_counter() - started_s
            each_s = spent_s / len(workers) if workers else 0.0
            late = number > 1 and spent_s + each_s + number * self.program.least_s > self.program.budget_s
            if self.session.communicator.broadcast_object(late, 0):
                break
            workers.append(self._made(plan, stack))
        return workers

    def _made(self, plan: Plan, stack: ExitStack) -> Worker:
        worker = self.make(plan)
        stack.callback(worker.close)
        worker.step(self.batch)  # the first one makes what the others use
        worker.state.finish()
        return worker

    def _turn_s(self, worker: Worker) -> float:
        """Seconds of a step, by the clock of the rank that takes longest."""
        communicator = self.session.communicator
        worker.step(self.batch)
        self._wait()
        communicator.barrier()
        begun_s = time.perf_counter()
        for _ in range(self.program.steps):
            worker.step(self.batch)
        self._wait()
        seconds = (time.perf_counter() - begun_s) / self.program.steps
        worker.state.finish()
        return max(communicator.all_gather_object(seconds))

    def _wait(self) -> None:
        if self.session.device.type != "cpu":
            torch.accelerator.synchronize(self.session.device)
