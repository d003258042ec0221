"""How fast the devices are now, over how fast they were when they were measured: what a prediction has to be compared at.

A shared machine is faster or slower from one minute to the next, and so is each of its emulated workers. Beside what is measured, all
workers compute for themselves for a while, forward and backward of the whole model as the profile has it too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from emulation import in_rounds

from heterodyne.plan.plan import Plan

if TYPE_CHECKING:
    from hand_made import Rig
    from torch import Tensor, nn

__all__ = ["Pace", "at_pace", "between", "run_in_turns"]

_PACE = "pace"


class Pace:
    """How long each worker needs for some work of its own, all at the same time, over how long it needed by the profile. Collective.

    ``batch``: of a size at which the whole model was measured; ``seconds``: about how long it works each time.
    """

    def __init__(self, rig: Rig, module: nn.Module, batch: Mapping[str, Tensor], *, seconds: float = 1.0) -> None:
        import torch

        from heterodyne.api.measured_draws import MeasuredDraws

        self._around = MeasuredDraws.of(rig.captured.graph, rig.session.device)
        self._gather = rig.session.communicator.all_gather_object
        self._barrier = torch.distributed.barrier
        self._module, self._batch = module, batch
        compute = rig.costs.compute[rig.session.cluster.devices[rig.session.rank].id]
        mine = compute.micro_batch_s(len(next(iter(batch.values()))))
        self._count = max(1, round(seconds / mine))
        self._by_profile = self._gather(self._count * mine)
        self._run()

    def __call__(self) -> list[float]:
        return [now / first for now, first in zip(self._gather(self._run()), self._by_profile, strict=True)]

    @property
    def bytes(self) -> int:
        """Of its own weights and gradients."""
        return sum(2 * p.nbytes for p in self._module.parameters())

    def _run(self) -> float:
        import torch

        from heterodyne.frontend import loss_of

        size = len(next(iter(self._batch.values())))
        self._barrier()
        started = time.perf_counter()
        for _ in range(self._count):
            with nullcontext() if self._around is None else self._around.forward(size):
                loss = loss_of(self._module(**self._batch))
            with nullcontext() if self._around is None else self._around.backward(size):
                torch.autograd.backward(loss)
        return time.perf_counter() - started


def at_pace(rig: Rig, plan: Plan, paces: Sequence[float]) -> float:
    """Seconds of a step if each device takes so many times as long as its profile says."""
    devices = {
        name: replace(own, calibration=own.calibration * pace)
        for (name, own), pace in zip(rig.profile.devices.items(), paces, strict=True)
    }
    return replace(rig, profile=replace(rig.profile, devices=devices)).predicted(plan).step_s


def between(before: Sequence[float], after: Sequence[float]) -> list[float]:
    """The paces in the middle."""
    return [(a + b) / 2 for a, b in zip(before, after, strict=True)]


def run_in_turns(
    rig: Rig,
    run: Mapping[str, Callable[[], object]],
    plans: Mapping[str, Plan],
    pace: Pace,
    out: Path,
    *,
    rounds: int,
    steps: int,
    **told: Any,
) -> None:
    """Ways take turns, the devices' own work among them; rank 0 writes the seconds of the ways and what was predicted for the plans, at
    the paces in the middle of all rounds. The first step of a turn does not count: a step of training follows its like, and finds in the
    caches what that has left. ``told``: written too. Collective."""
    found: list[list[float]] = []
    turns = {**run, _PACE: lambda: found.append(pace())}
    seconds = in_rounds(turns, rig.session.communicator, rounds=rounds, steps=steps, settle=1).seconds
    paces = [median(of_device) for of_device in zip(*found[steps + 1 :], strict=True)]  # the first round warms up
    if rig.session.rank == 0:
        predicted = {way: at_pace(rig, plan, paces) for way, plan in plans.items()}
        ways = {way: of for way, of in seconds.items() if way != _PACE}
        out.write_text(json.dumps({**ways, "predicted": predicted, "paces": paces, **told}))
