"""The tables of a simulated step: the figures of the whole, and what each rank spends its time and its memory on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heterodyne.cluster import Cluster
from heterodyne.plan import Plan
from heterodyne.report.plan_shares import stages_of
from heterodyne.report.rows import Column, Rows
from heterodyne.report.words import DASH, byte_size, change, digits, percent, seconds
from heterodyne.sim.run import Simulation, Span

__all__ = ["RankShares", "lacking", "rank_shares", "simulation_rows"]

_FORWARD, _BACKWARD, _UPDATE = ("F",), ("B", "I", "W"), ("CLIP", "STEP")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """Shares of a step, 0 to 1. All but ``communication`` add up to 1 together with ``other``.

    Args:
        forward, backward, recompute, update: of the passes, whole or in halves, and of clipping and the optimizer.
        other: what a step takes besides its actions.
        bubble: in which the rank computes nothing.
        communication: in which a message or a reduction of the rank is on its way, beside compute or not.
    """

    rank: int
    forward: float
    backward: float
    recompute: float
    update: float
    other: float
    bubble: float
    communication: float


def rank_shares(simulation: Simulation) -> tuple[RankShares, ...]:
    """One entry a rank, of the last step that was played; all zero but the bubble for an idle one."""
    last = max((span.step for span in simulation.spans), default=0)
    of_rank: list[list[Span]] = [[] for _ in simulation.busy_s]
    for span in simulation.spans:
        if span.step == last:
            of_rank[span.rank].append(span)
    return tuple(_shares(simulation, rank, spans) for rank, spans in enumerate(of_rank))


def _shares(simulation: Simulation, rank: int, spans: Sequence[Span]) -> RankShares:
    step_s = simulation.step_s or 1.0

    def part(*kinds: str) -> float:
        return sum(span.end_s - span.start_s for span in spans if span.action.kind in kinds) / step_s

    forward, backward, recompute, update = part(*_FORWARD), part(*_BACKWARD), part("R"), part(*_UPDATE)
    bubble = simulation.bubble[rank]
    # A receive is waiting for what somebody else sends, not work of one's own.
    sent = ((s.start_s, s.end_s) for s in spans if s.lane == "comm" and not s.action.kind.startswith("RECV"))
    return RankShares(
        rank=rank,
        forward=forward,
        backward=backward,
        recompute=recompute,
        update=update,
        other=max(0.0, 1 - bubble - forward - backward - recompute - update),
        bubble=bubble,
        communication=min(1.0, _covered(sent) / step_s),
    )


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def simulation_rows(simulation: Simulation, plan: Plan, cluster: Cluster, bound_s: float) -> tuple[Rows, Rows]:
    """The figures of the step, and a row for each rank. ``bound_s``: no step of this plan is shorter."""
    return _figures(simulation, plan, cluster, bound_s), _ranks(simulation, plan, cluster)


def _figures(simulation: Simulation, plan: Plan, cluster: Cluster, bound_s: float) -> Rows:
    step_s = simulation.step_s
    working = [cluster.rank(device) for device in plan.devices]
    bubble = sum(simulation.bubble[rank] for rank in working) / len(working) if working else 0.0
    facts = [
        ("step", seconds(step_s)),
        ("samples/s", digits(plan.global_batch_size / step_s if step_s > 0 else None)),
        ("bubble", f"{percent(bubble)}, mean of the {len(working)} ranks that take part"),
        ("bound", f"{seconds(bound_s)}: no step of this plan is shorter; {percent(bound_s / step_s if step_s > 0 else None)} reached"),
    ]  # fmt: skip
    if plan.predicted is not None:
        said = plan.predicted.step_s
        facts.append(
            ("the plan says", f"{seconds(said)} a step ({change(step_s / said - 1 if said > 0 else None)} here)")
        )
    return Rows(title="Simulated", columns=(Column(title=""), Column(title="")), rows=tuple(facts))


def _ranks(simulation: Simulation, plan: Plan, cluster: Cluster) -> Rows:
    stages = stages_of(plan)
    each = rank_shares(simulation)
    again, other = any(s.recompute for s in each), any(s.other > 5e-4 for s in each)
    rows = []
    for device, shares in zip(cluster.devices, each, strict=True):
        peak = simulation.peak_bytes[shares.rank]
        parts = [shares.forward, shares.backward, *([shares.recompute] if again else []), shares.update]
        parts += [*([shares.other] if other else []), shares.bubble, shares.communication]
        working = device.id in stages
        room = device.memory_bytes - peak
        rows.append(
            (
                str(shares.rank),
                device.id,
                stages.get(device.id, "idle"),
                *(percent(part) if working else DASH for part in parts),
                byte_size(peak) if working else DASH,
                byte_size(device.memory_bytes),
                "" if room >= 0 else f"LACKS {byte_size(-room)}",
            )
        )
    titles = ("rank", "device", "stage", "forward", "backward", *(("recompute",) if again else ()), "update")
    titles += (*(("other",) if other else ()), "bubble", "communication", "peak", "of", "")
    left = ("device", "stage", "")
    return Rows(
        title="Shares of the step, and memory at its peak",
        columns=tuple(Column(title=title, align="left" if title in left else "right") for title in titles),
        rows=tuple(rows),
        notes=(
            "bubble: the rank computes nothing; communication: a message or a reduction of the rank is on its way, "
            "beside compute or not",
        ),
    )


def lacking(simulation: Simulation, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """A sentence for each device that has less memory than the plan needs of it at its peak."""
    stages = stages_of(plan)
    short = []
    for device, peak in zip(cluster.devices, simulation.peak_bytes, strict=True):
        if peak > device.memory_bytes:
            short.append(
                f"{device.id} (stage {stages.get(device.id, DASH)}) needs {byte_size(peak)}, has {byte_size(device.memory_bytes)}: "
                f"lacks {byte_size(peak - device.memory_bytes)}"
            )
    return tuple(short)
