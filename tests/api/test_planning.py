"""A plan is tried: where the measured curves were wrong, the shares become those of a planner that knew the truth."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.api.planning import Share, plan_and_try, plan_once
from heterodyne.api.rehearsal import rehearse
from heterodyne.cluster import Profile
from heterodyne.plan import Plan
from heterodyne.search.planned import Planned
from heterodyne.search.planner import plan
from pure.build import cluster, graph, linear, profile

MODEL = graph(4)
BATCH = 64


class Machines:
    """Devices of known speed, in the place of a session; rank 0's view of them."""

    def __init__(self, seconds_per_sample: Sequence[float]) -> None:
        self.cluster = cluster(len(seconds_per_sample))
        self.rank, self.world_size = 0, len(seconds_per_sample)
        self.agreement = SimpleNamespace(on_rank0=lambda do: do())
        self.communicator = SimpleNamespace(
            all_gather_object=lambda _: self._all(), broadcast_object=lambda value, _: value
        )
        self.trials = 0
        self.searches = 0
        self._seconds = seconds_per_sample
        self._plan: Plan | None = None

    def search(self, known: Profile) -> Planned:
        self.searches += 1
        found = plan(MODEL, self.cluster, known, global_batch_size=BATCH, strategy="data")
        self._plan = found.plan
        return found

    def attempt(self, share: Share) -> float:
        self.trials += 1
        return sum(sum(sizes) for _, sizes in share) * self._seconds[0]

    def _all(self) -> list[float]:
        assert self._plan is not None
        shares = {p.stages[0].devices[0]: p.micro_batches.samples for p in self._plan.pipelines}
        return [shares.get(d.id, 0) * s for d, s in zip(self.cluster.devices, self._seconds, strict=True)]

    def give_back(self) -> None:
        pass

    @contextmanager
    def announced(self, words: str) -> Iterator[None]:
        yield


def profile_of(machines: Machines, curves: Sequence[Callable[[int], float]]) -> Profile:
    return profile(MODEL, machines.cluster, curves, reduce=lambda _: 1e-9)


def shares(found: Plan) -> list[int]:
    return [p.micro_batches.samples for p in found.pipelines]


@settings(max_examples=6)
@given(
    st.lists(st.floats(0.05, 0.5), min_size=2, max_size=4),
    st.lists(st.floats(0.8, 1.25), min_size=4, max_size=4),
)
def test_after_the_trials_the_prediction_is_the_truth(truth: list[float], wrong: list[float]) -> None:
    machines: Any = Machines(truth)
    believed = [linear(s * w) for s, w in zip(truth, wrong, strict=False)]
    found, planned, calibrated = plan_and_try(
        machines, machines.search, profile_of(machines, believed), machines.attempt
    )
    assert planned is not None
    for device, seconds in planned.compute_s.items():
        own = dict(zip((d.id for d in machines.cluster.devices), truth, strict=True))[device]
        samples = {p.stages[0].devices[0]: p.micro_batches.samples for p in found.pipelines}[device]
        assert seconds == pytest.approx(samples * own, rel=0.03)
    known = plan(MODEL, machines.cluster, profile_of(machines, [linear(s) for s in truth]), global_batch_size=BATCH)
    assert max(s * t for s, t in zip(shares(found), truth, strict=False)) <= 1.05 * known.simulation.step_s
    assert set(calibrated.devices) == {d.id for d in machines.cluster.devices}


def test_a_true_profile_is_tried_once_and_stays() -> None:
    machines: Any = Machines([0.1, 0.2, 0.2, 0.35])
    true = profile_of(machines, [linear(s) for s in (0.1, 0.2, 0.2, 0.35)])
    found, _, calibrated = plan_and_try(machines, machines.search, true, machines.attempt)
    assert machines.trials == 1
    assert found.pipelines == plan_once(machines, machines.search, true)[0].pipelines
    assert all(d.calibration == pytest.approx(1.0) for d in calibrated.devices.values())


@pytest.mark.parametrize(("noise", "trials"), [(1.02, 1), (1.5, 2)])
def test_a_balance_that_is_hardly_better_is_not_tried_again(noise: float, trials: int) -> None:
    """One device takes longer in each trial than was believed; what another share of it would win decides."""
    machines: Any = Machines([0.1, 0.1, 0.1 * noise])
    believed = profile_of(machines, [linear(0.1)] * 3)
    plan_and_try(machines, machines.search, believed, machines.attempt)
    assert machines.trials == trials


def test_workers_do_not_load_the_planner() -> None:
    """Only the one that plans does, when it plans: its solver alone is 35 MiB."""
    program = "import heterodyne.api.train, heterodyne.api.distributing, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "heterodyne.api.preparation" in loaded
    assert not {"scipy", "heterodyne.search.planner", "heterodyne.search.fleet.search"} & set(loaded)


def test_one_device_has_nothing_to_balance() -> None:
    machines: Any = Machines([0.1])
    plan_and_try(machines, machines.search, profile_of(machines, [linear(0.2)]), machines.attempt)
    assert (machines.trials, machines.searches) == (0, 1)


@pytest.mark.parametrize(
    ("budget_s", "steps", "rehearses"),
    [(0.0, None, False), ("auto", 1, False), ("auto", 10**6, True), ("auto", None, True), (1e3, 1, True)],
)
def test_a_rehearsal_takes_what_was_asked_or_a_part_of_the_training(
    budget_s: float | Literal["auto"], steps: int | None, rehearses: bool
) -> None:
    machines = cluster(3)
    known = profile(MODEL, machines, [linear(0.01 / s) for s in (0.7, 0.5, 0.3)], optimizer_s=0.01)
    planned = plan(MODEL, machines, known, global_batch_size=24)
    session: Any = SimpleNamespace(
        world_size=3,
        cluster=machines,
        communicator=SimpleNamespace(broadcast_object=lambda value, _: value),
        announced=lambda _: nullcontext(),
    )

    class MadeError(Exception):
        """A worker would be made."""

    def make(_: object) -> Any:
        raise MadeError

    with pytest.raises(MadeError) if rehearses else nullcontext():
        assert rehearse(session, planned, make, {}, budget_s=budget_s, training_steps=steps) == {}
