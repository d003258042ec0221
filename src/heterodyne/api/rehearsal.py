"""A rehearsal: the plans that are predicted to be nearly the fastest are run for a few steps, and the clock decides.

A prediction is right to a few percent, and the best plans of a search are often closer together than that. What is rehearsed works on
copies of the model; weights, optimizer and data of the run are not touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from heterodyne.api.session import Session
from heterodyne.plan.plan import Plan
from heterodyne.runtime.worker import Worker
from heterodyne.search.contenders import near_the_chosen, still_in
from heterodyne.search.planned import Planned, identity
from heterodyne.units import format_seconds

__all__ = ["rehearse"]

_MOST_PLANS = 6
_ROUNDS = 3
_MOST_ROUNDS = 20
_MEMORY = 0.8
"""Of each device: what plans that take turns may fill together."""

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class _Program:
    """What is to be run, as rank 0 has found it. ``beside``: all of them fit into memory at once, so that they can take turns."""

    plans: tuple[str, ...]
    beside: bool


def rehearse(
    session: Session,
    planned: Planned | None,
    make: Callable[[Plan], Worker],
    batch: Batch,
    *,
    budget_s: float,
) -> Mapping[str, float]:
    """Seconds of a step by the `identity` of the plan; empty where there is nothing to tell apart, or no time for it.

    Args:
        planned: on rank 0.
        make: a worker on a copy of the model. Collective.
        batch: a global batch.

    Collective. The same on every rank.
    """
    program = session.communicator.broadcast_object(_program(session, planned, budget_s), 0)
    if not program.plans:
        return {}
    plans = [Plan.parse(text) for text in program.plans]
    groups = [plans] if program.beside else [[plan] for plan in plans]
    found: dict[str, float] = {}
    with session.announced(f"rehearsing {len(plans)} plans, for about {format_seconds(budget_s)} at most"):
        for group in groups:
            seconds = _in_turns(session, group, make, batch, budget_s / len(groups))
            found.update((identity(plan), own) for plan, own in zip(group, seconds, strict=True))
    return session.communicator.broadcast_object(found, 0)


def _program(session: Session, planned: Planned | None, budget_s: float) -> _Program:
    nothing = _Program(plans=(), beside=False)
    if planned is None or session.world_size < 2:
        return nothing
    step_s = planned.chosen.step_s or 0.0
    most = _MOST_PLANS if step_s <= 0 else min(_MOST_PLANS, int(budget_s / (step_s * (1 + _ROUNDS))))
    near = near_the_chosen(planned, most) if most > 1 else ()
    plans = tuple(candidate.plan.dump() for candidate in near if candidate.plan is not None)
    used = [candidate.simulation.peak_bytes for candidate in near if candidate.simulation is not None]
    rooms = [device.memory_bytes for device in session.cluster.devices]
    beside = all(sum(of_rank) <= _MEMORY * room for of_rank, room in zip(zip(*used, strict=True), rooms, strict=False))
    return _Program(plans=plans, beside=beside) if len(plans) > 1 else nothing


def _in_turns(
    session: Session, plans: Sequence[Plan], make: Callable[[Plan], Worker], batch: Batch, budget_s: float
) -> list[float]:
    """Of each plan the median second of a step, by this rank's clock; in rounds, so that a machine that gets slower does so for all."""
    started_s = time.perf_counter()
    taken: list[list[float]] = [[] for _ in plans]
    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        workers = []
        for plan in plans:
            workers.append(make(plan))
            stack.callback(workers[-1].close)
            workers[-1].step(batch)  # the first one makes what the others use
        for number in range(_MOST_ROUNDS):
            late = number >= _ROUNDS and time.perf_counter() - started_s > budget_s
            left = session.communicator.broadcast_object([] if late else still_in(taken), 0)
            if not left or (number >= _ROUNDS and len(left) == 1):
                break
            for place in left:
                session.communicator.barrier()
                begun_s = time.perf_counter()
                workers[place].step(batch)
                if session.device.type != "cpu":
                    torch.accelerator.synchronize(session.device)
                session.communicator.barrier()
                taken[place].append(time.perf_counter() - begun_s)
    return [median(seconds) for seconds in taken]
