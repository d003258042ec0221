"""``heterodyne simulate``: what a plan would do, without doing it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from heterodyne.api.job_model import JobModel, capture_job, open_data, settings_of
from heterodyne.api.measuring import measure_everywhere
from heterodyne.api.offline import played, require_fitting
from heterodyne.api.printing import show, show_step, terminal_width
from heterodyne.api.session import Session, open_session
from heterodyne.api.settings import Settings
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.errors import PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.plan.bind import bind
from heterodyne.plan.check import require_valid
from heterodyne.plan.order import orders_of
from heterodyne.plan.plan import Pipeline, Plan
from heterodyne.plan.precision import in_words, precision_of
from heterodyne.plan.schedules import SCHEDULES, Orders
from heterodyne.plan.schedules.check import order_faults
from heterodyne.plan.schedules.csv_file import computing, load_csv
from heterodyne.plan.schedules.times import Read
from heterodyne.plan.traffic import Traffic
from heterodyne.report.faulty_orders import drawn_faults
from heterodyne.report.simulated import simulation_rows
from heterodyne.text_files import write_text

__all__ = ["Simulated", "simulate_job"]


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What to simulate.

    Args:
        plan: obeyed as it stands, whatever the job says of batch and precision.
        schedule: the name of one, or a schedule file as PyTorch writes it, in place of what the plan has; None: the plan's own.
        cluster, profile: what was known before; None: the devices of the session, and measured there.
        out: where the timeline is written; the trace for Perfetto goes beside it, as ``*.trace.json``.
    """

    plan: Plan
    schedule: str | None
    cluster: Cluster | None
    profile: Profile | None
    out: Path


def simulate_job(job: Job, base: Path, wanted: Simulated, *, cluster_file: Path | None) -> int:
    """Play a plan, print what comes out, and write its timeline.

    Raises PlanError for a plan or a schedule that cannot run, InfeasibleError (after the figures) where a device lacks memory.
    """
    # With all that is known no rank is asked for anything: one process simulates any cluster.
    asks = wanted.cluster is None or wanted.profile is None
    with open_session(cluster_file if asks else None) as session:
        cluster = wanted.cluster if wanted.cluster is not None else session.cluster
        model = capture_job(session, job, base, open_data(session, job, base))
        settings = settings_of(job, session)
        plan = session.together(lambda: _ready(wanted, model.captured.graph, cluster))
        if plan.precision != settings.precision:
            session.say(
                f"the plan computes in {in_words(plan.precision)}, and that is simulated; the job asks for {in_words(settings.precision)}"
            )
        profile = wanted.profile or _measured(session, model, replace(settings, precision=plan.precision))
        profile.require({d.id: precision_of(plan.precision, d.kind) for d in cluster.devices})
        session.agreement.only_on_rank0(
            lambda: _tell(session, wanted, settings, plan, model.captured.graph, cluster, profile)
        )
    return 0


def _measured(session: Session, model: JobModel, settings: Settings) -> Profile:
    return measure_everywhere(session, model.captured, model.whole, settings)


def _ready(wanted: Simulated, graph: ModelGraph, cluster: Cluster) -> Plan:
    """The plan with the schedule that is asked for, once both can run. Raises PlanError."""
    plan = bind(wanted.plan, graph, cluster)
    require_valid(plan, graph, cluster)
    plan = plan if wanted.schedule is None else _rescheduled(plan, wanted.schedule)
    for number, pipeline in enumerate(plan.pipelines):
        _require_orders(number, pipeline, orders_of(plan.schedule, pipeline), graph, wanted.schedule)
    return plan


def _rescheduled(plan: Plan, schedule: str) -> Plan:
    """The same plan under another schedule. Raises PlanError."""
    if schedule in SCHEDULES:
        pipelines = [pipeline.model_copy(update={"order": ()}) for pipeline in plan.pipelines]
        return plan.model_copy(update={"schedule": schedule, "pipelines": tuple(pipelines), "predicted": None})
    path = Path(schedule)
    if not path.exists() and path.suffix != ".csv":
        raise PlanError(f"--schedule {schedule}: neither a CSV file nor a schedule; it can be {', '.join(SCHEDULES)}")
    rows = computing(load_csv(path))
    counts = [len(pipeline.places) for pipeline in plan.pipelines]
    if all(count == len(rows) for count in counts):
        parts = [rows] * len(counts)
    elif len(rows) == sum(counts):
        starts = [sum(counts[:number]) for number in range(len(counts))]
        parts = [rows[start : start + count] for start, count in zip(starts, counts, strict=True)]
    else:
        raise PlanError(
            f"has {len(rows)} rows, the pipelines of the plan have {', '.join(map(str, counts))} places: write a row for each place, "
            "pipeline by pipeline",
            path=schedule,
        )
    pipelines = [
        pipeline.model_copy(update={"order": tuple(" ".join(map(str, row)) for row in part)})
        for pipeline, part in zip(plan.pipelines, parts, strict=True)
    ]
    return plan.model_copy(update={"pipelines": tuple(pipelines), "predicted": None})


def _require_orders(number: int, pipeline: Pipeline, orders: Orders, graph: ModelGraph, schedule: str | None) -> None:
    """Raises PlanError with the grid drawn and the fault marked."""
    traffic = Traffic.of(pipeline, graph)
    reads = [
        Read(source=source, reader=reader, backward_s=0.0 if source in traffic.returns.get(reader, ()) else None)
        for reader, sources in traffic.sources.items()
        for source in sources
    ]
    faults = order_faults(
        orders,
        pipeline.place_of_stage,
        len(pipeline.micro_batches),
        reads=reads,
        recomputes=[index for index, stage in enumerate(pipeline.stages) if stage.recompute],
    )
    if faults:
        raise PlanError(
            f"pipeline {number} cannot run in this order:\n{drawn_faults(orders, faults, terminal_width())}",
            path=schedule if schedule not in SCHEDULES else None,
        )


def _tell(
    session: Session,
    wanted: Simulated,
    settings: Settings,
    plan: Plan,
    graph: ModelGraph,
    cluster: Cluster,
    profile: Profile,
) -> None:
    """Play, print, write; on rank 0. Raises InfeasibleError last, for the figures tell how much is lacking."""
    simulation, bound_s = played(plan, graph, cluster, profile, settings.optimizer)
    show(*simulation_rows(simulation, plan, cluster, bound_s))
    timeline = simulation.timeline([device.id for device in cluster.devices])
    show_step(timeline)
    timeline.save(wanted.out)
    trace = wanted.out.with_suffix(".trace.json")
    write_text(trace, json.dumps(timeline.to_perfetto(), allow_nan=False))
    sys.stdout.flush()
    session.say(f"wrote {wanted.out} and {trace}")
    require_fitting(simulation, plan, cluster)
