"""Search, try, search again: a plan is believed once every device has done its share of it.

The planner (rank 0) knows devices by their curves only; a trial measures the error of each curve at the planned share.
Profiles are calibrated by that and the search is repeated, until it finds no better balance than was tried, or enough was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from heterodyne.api.session import Session
from heterodyne.cluster.profile import Profile
from heterodyne.plan.plan import Plan
from heterodyne.search.planned import Planned

__all__ = ["Share", "plan_and_try", "plan_once", "share_of"]

_MOST_TRIALS = 4
_GOOD_ENOUGH = 0.03  # what a better balance would win less of a step is within the noise

Search = Callable[[Profile], Planned]
Share = tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
"""What one device computes in a step: for each of its stages the ops ``[start, stop)``, and the samples of each micro-batch."""

Look = Callable[[Profile], Profile]
"""The profile with what each rank occupies of its memory by now. Collective."""

Attempt = Callable[[Share], float]
"""Seconds of forward and backward that this rank needs for its share, while the others do theirs. Collective."""


def _unchanged(profile: Profile) -> Profile:
    return profile


def plan_once(
    session: Session, search: Search, profile: Profile, look: Look = _unchanged
) -> tuple[Plan, Planned | None]:
    """Rank 0 searches; every rank gets the plan. ``Planned`` is None on the others. Raises what the search does, everywhere."""
    found: list[Planned] = []
    profile = look(profile)

    def dumped() -> str:
        found.append(search(profile))
        return found[0].plan.dump()

    text = session.agreement.on_rank0(dumped)
    session.give_back()
    return Plan.parse(text), found[0] if found else None


def plan_and_try(
    session: Session,
    search: Search,
    profile: Profile,
    attempt: Attempt,
    *,
    look: Look = _unchanged,
    trials: int = _MOST_TRIALS,
) -> tuple[Plan, Planned | None, Profile]:
    """The plan that stood its trial, and the profile as calibrated by it. Collective; one device has nothing to balance."""
    plan, planned = plan_once(session, search, profile, look)
    found: dict[str, list[float]] = {device.id: [] for device in session.cluster.devices}
    for trial in range(trials if session.world_size > 1 else 0):
        with session.announced(f"trying the plan, each device its share (trial {trial + 1} of at most {trials})"):
            seconds, ratios = _try(session, attempt, plan, planned)
        for device, ratio in ratios.items():
            found[device].append(profile.devices[device].calibration * ratio)
        profile = _calibrated(profile, found)
        tried = _parts(session, plan)
        plan, planned = plan_once(session, search, profile, look)
        # A second trial of nearly the same shares would measure the noise of the machine.
        slowest_s = session.communicator.broadcast_object(
            max(planned.compute_s.values(), default=0.0) if planned else 0.0, 0
        )
        if _parts(session, plan) == tried and slowest_s > (1 - _GOOD_ENOUGH) * max(seconds):
            break
    return plan, planned, profile


def _try(
    session: Session, attempt: Attempt, plan: Plan, planned: Planned | None
) -> tuple[Sequence[float], dict[str, float]]:
    """The seconds that each rank needed; and for each device with a share, those over the ones that were predicted."""
    mine = session.cluster.devices[session.rank].id
    seconds = session.communicator.all_gather_object(attempt(share_of(plan, mine)))
    expected = session.communicator.broadcast_object({} if planned is None else dict(planned.compute_s), 0)
    return seconds, {
        device.id: measured_s / expected[device.id]
        for device, measured_s in zip(session.cluster.devices, seconds, strict=True)
        if measured_s > 0 and expected.get(device.id, 0.0) > 0
    }


def _parts(session: Session, plan: Plan) -> Sequence[Sequence[tuple[int, int]]]:
    """The stages of each device, of however many samples."""
    return [[ops for ops, _ in share_of(plan, device.id)] for device in session.cluster.devices]


def share_of(plan: Plan, device: str) -> Share:
    """Return what a device has to compute under a plan; nothing of sharded stages, which no device can try by itself."""
    parts = []
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if device in stage.devices and not stage.sharded:
                position = stage.devices.index(device)
                counts = [stage.slices(size)[position][1] for size in pipeline.micro_batches.sizes]
                parts.append((stage.ops, tuple(count for count in counts if count)))
    return tuple(parts)


def _calibrated(profile: Profile, found: Mapping[str, Sequence[float]]) -> Profile:
    """Each device calibrated by all of its trials: their median, for a share of seconds is tried once, beside whatever else runs."""
    tried = {
        device: replace(profile.devices[device], calibration=median(ratios))
        for device, ratios in found.items()
        if ratios
    }
    return replace(profile, devices={**profile.devices, **tried})
