"""Search, try, search again: a plan is believed once every device has done its share of it.

The planner (rank 0) knows devices by their curves only; a trial tells by how much each curve is off for just the share that was
planned. Profiles are calibrated by that and the search is repeated, until prediction and trial agree or enough was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from heterodyne.api.session import Session
from heterodyne.cluster.profile import Profile
from heterodyne.plan.plan import Plan
from heterodyne.search.planned import Planned

__all__ = ["plan_and_try", "plan_once"]

_MOST_TRIALS = 3
_GOOD_ENOUGH = 0.03  # a balance that is off by less cannot be told from noise

Search = Callable[[Profile], Planned]
Attempt = Callable[[Sequence[int]], float]
"""Seconds that this rank needs for micro-batches of these sizes, while the others do theirs. Collective."""


def plan_once(session: Session, search: Search, profile: Profile) -> tuple[Plan, Planned | None]:
    """Rank 0 searches; every rank gets the plan. ``Planned`` is None on the others. Raises what the search does, everywhere."""
    found: list[Planned] = []

    def dumped() -> str:
        found.append(search(profile))
        return found[0].plan.dump()

    return Plan.parse(session.agreement.first(dumped)), found[0] if found else None


def plan_and_try(
    session: Session, search: Search, profile: Profile, attempt: Attempt, *, trials: int = _MOST_TRIALS
) -> tuple[Plan, Planned | None, Profile]:
    """The plan that stood its trial, and the profile as calibrated by it. Collective; one device has nothing to balance."""
    plan, planned = plan_once(session, search, profile)
    for trial in range(trials if session.world_size > 1 else 0):
        with session.announced(f"trying the plan, each device its share (trial {trial + 1} of at most {trials})"):
            profile, gap = _calibrated(session, attempt, plan, planned, profile)
        plan, planned = plan_once(session, search, profile)
        if gap < _GOOD_ENOUGH:
            break
    return plan, planned, profile


def _calibrated(
    session: Session, attempt: Attempt, plan: Plan, planned: Planned | None, profile: Profile
) -> tuple[Profile, float]:
    """The profile, calibrated by what each device needed for its share; and by how much the worst prediction was off."""
    mine = session.cluster.devices[session.rank].id
    shares = {pipeline.stages[0].devices[0]: pipeline.micro_batches.sizes for pipeline in plan.pipelines}
    seconds = session.communicator.all_gather_object(attempt(shares.get(mine, ())))
    expected = session.communicator.broadcast_object({} if planned is None else dict(planned.compute_s), 0)
    devices = dict(profile.devices)
    gap = 0.0
    for device, measured_s in zip(session.cluster.devices, seconds, strict=True):
        predicted_s = expected.get(device.id, 0.0)
        if measured_s > 0 and predicted_s > 0:
            ratio = measured_s / predicted_s
            gap = max(gap, abs(ratio - 1))
            before = devices[device.id]
            devices[device.id] = replace(before, calibration=before.calibration * ratio)
    return replace(profile, devices=devices), gap
