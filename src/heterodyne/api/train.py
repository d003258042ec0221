"""``heterodyne train``: the main job, from a job file to a report."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import yaml

from heterodyne.api.job_model import capture_job, open_data, settings_of
from heterodyne.api.preparation import Prepared, prepare
from heterodyne.api.printing import candidate_lines, show, show_planned
from heterodyne.api.session import Session, open_session
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.written import cluster_to_json
from heterodyne.errors import HeterodyneError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.models import build
from heterodyne.plan.plan import Plan
from heterodyne.report.compare import compare
from heterodyne.report.html import write_report
from heterodyne.report.run import load_run
from heterodyne.report.tables import prediction_rows, summary_rows
from heterodyne.runtime.data.text import TextData
from heterodyne.runtime.records.progress import Reporter, SilentReporter, reporter_for
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.records.run_directory import RunDirectory
from heterodyne.runtime.trainer import Outcome, Trainer
from heterodyne.runtime.worker import Worker

__all__ = ["train_job"]

_RUNS = Path("runs")
_INTERRUPTED = 130


def train_job(
    job_file: Path,
    overrides: Sequence[str],
    *,
    cluster_file: Path | None,
    plan_file: Path | None,
    run_dir: Path | None,
    resume: bool,
) -> int:
    """Train a job on the devices of the session. Returns 0, or 130 if it was stopped on request.

    With ``resume`` the run goes on from its newest whole checkpoint; a plan that it was made under is kept if the cluster is the same.
    """
    job = Job.load(job_file, tuple(overrides))
    base = job_file.parent
    with open_session(cluster_file) as session:
        run = _run_directory(session, job_file.stem, run_dir, resume=resume)
        session.say(f"run directory {run.path}")
        data = open_data(session, job, base)
        source = capture_job(session, job, base, data)
        graph = source.captured.graph
        given, profile = _kept(session, run, graph, plan_file, resume=resume)
        prepared = prepare(session, source.captured, source.whole, settings_of(job), given=given, profile=profile)
        if prepared.planned is not None:
            _describe(run, job, session, prepared)
        outcome = _train(session, run, job, base, data, prepared, resume=resume)
        if session.rank == 0:
            _summarise(run, graph, outcome)
        return _INTERRUPTED if outcome.interrupted else 0


def _run_directory(session: Session, name: str, given: Path | None, *, resume: bool) -> RunDirectory:
    def choose() -> RunDirectory:
        if resume:
            return RunDirectory.latest(_RUNS, name) if given is None else RunDirectory.existing(given)
        return RunDirectory.create_next(_RUNS, name) if given is None else RunDirectory.create(given)

    return session.agreement.first(choose)


def _kept(
    session: Session, run: RunDirectory, graph: ModelGraph, plan_file: Path | None, *, resume: bool
) -> tuple[Plan | None, Profile | None]:
    """The plan to obey, if there is one, and with a resumed run on the same cluster what was measured for it."""
    if plan_file is not None:
        return session.together(lambda: Plan.load(plan_file)), None
    if not resume:
        return None, None

    def read() -> tuple[Plan | None, Profile | None]:
        try:
            plan, profile = Plan.load(run.plan), Profile.load(run.profile)
        except HeterodyneError:
            return None, None  # stopped before it had planned
        same = (plan.model, plan.cluster) == (graph.fingerprint, session.cluster.fingerprint)
        return (plan, profile) if same else (None, None)

    plan, profile = session.agreement.first(read)
    if plan is None:
        session.say("the cluster is not the one of the run so far: measuring and planning again")
    return plan, profile


def _describe(run: RunDirectory, job: Job, session: Session, prepared: Prepared) -> None:
    """Print the plan, and write down everything that is known before the first step. On rank 0."""
    planned = prepared.planned
    assert planned is not None
    show_planned(planned)
    run.job.write_text(
        yaml.safe_dump(job.model_dump(mode="json", exclude_none=True), sort_keys=False), encoding="utf-8"
    )
    run.cluster.write_text(cluster_to_json(session.cluster), encoding="utf-8")
    prepared.plan.save(run.plan)
    prepared.profile.save(run.profile)
    run.candidates.write_text(json.dumps(candidate_lines(planned), indent=1) + "\n", encoding="utf-8")
    planned.simulation.timeline([device.id for device in session.cluster.devices]).save(run.timeline("simulated"))


def _train(
    session: Session, run: RunDirectory, job: Job, base: Path, data: TextData, prepared: Prepared, *, resume: bool
) -> Outcome:
    first = session.rank == 0
    captured, plan = prepared.captured, prepared.plan
    with session.phase("building the model"):
        model = session.together(
            lambda: build(job.model, base=base, device="cpu" if first else "meta", seed=job.training.seed)
        )
        recorder = Recorder(rank=session.rank, device=session.device)
        worker = Worker(
            model,
            graph=captured.graph,
            plan=plan,
            program=prepared.program,
            cluster=session.cluster,
            communicator=session.communicator,
            loss_count=captured.loss_count,
            optimizer=job.optimizer,
            total_steps=job.training.steps,
            seed=job.training.seed,
            clip_grad_norm=job.training.clip_grad_norm,
            recorder=recorder,
            watch=session.watchdog,
        )
    reporter: Reporter = reporter_for(sys.stderr, total=job.training.steps) if first else SilentReporter(0)
    ideal = None if prepared.planned is None else sum(prepared.planned.rates.values())
    trainer = Trainer(
        worker=worker,
        data=data,
        job=job,
        plan=plan,
        run=run,
        agreement=session.agreement,
        reporter=reporter,
        ideal_samples_per_s=ideal,
        phase=session.phase,
    )
    if resume:
        trainer.resume()
    outcome = trainer.train()
    trainer.export()
    with session.phase("gathering the timeline"):
        timeline = recorder.timeline(session.communicator, [device.id for device in session.cluster.devices])
    if timeline is not None:
        timeline.save(run.timeline("measured"))
    return outcome


def _summarise(run: RunDirectory, graph: ModelGraph, outcome: Outcome) -> None:
    """Write summary and report, and print what came out. On rank 0."""
    summary = {
        "model": graph.name,
        "parameters": graph.parameter_count,
        **asdict(outcome),
        "environment": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        },
    }
    run.summary.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    page = write_report(run.path)
    loaded = load_run(run.path)
    comparison = compare(loaded)
    show(summary_rows(loaded, comparison), prediction_rows(comparison))
    sys.stdout.write(f"report: {page}\n")
