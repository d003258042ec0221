"""``heterodyne train``: the main job, from a job file to a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import yaml

from heterodyne.api.job_model import capture_job, job_worker, open_data, settings_of
from heterodyne.api.learned_memory import as_learned, longest_step
from heterodyne.api.memory_ends import (
    lacked_so_far,
    noted_shortage,
    rescued_if_memory_ends,
    told_while_building,
    told_with_shortages,
)
from heterodyne.api.preparation import prepare
from heterodyne.api.printing import show, show_result
from heterodyne.api.run_files import write_plan_files, write_summary
from heterodyne.api.run_opening import open_job_run
from heterodyne.api.session import LONGEST_PHASE_S, Session, open_session
from heterodyne.api.settings import Prepared
from heterodyne.cluster.profile import Profile
from heterodyne.errors import HeterodyneError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job
from heterodyne.json_files import read_json
from heterodyne.plan.bind import bind
from heterodyne.plan.diff import differences
from heterodyne.plan.plan import Plan
from heterodyne.printable import printable
from heterodyne.processes.signals import orderly_stop
from heterodyne.report.compare import compare
from heterodyne.report.html import write_report
from heterodyne.report.run import load_run
from heterodyne.report.tables import prediction_rows, summary_rows
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints
from heterodyne.runtime.checkpoint.found import Checkpoint
from heterodyne.runtime.comm.disks import Disks
from heterodyne.runtime.data.source import DataSource
from heterodyne.runtime.engine import Outcome
from heterodyne.runtime.records.progress import Reporter, SilentReporter, reporter_for
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.records.run_lock import occupied
from heterodyne.runtime.records.shortages import Shortage
from heterodyne.runtime.rendezvous.environment import given_secret
from heterodyne.runtime.rendezvous.run_secret import secret_of_user
from heterodyne.runtime.sites.data import SiteData
from heterodyne.runtime.sites.sites import Sites, require_apart
from heterodyne.runtime.trainer import Trainer, identity_of
from heterodyne.runtime.worker import Worker
from heterodyne.search.explain import result_of
from heterodyne.secret_names import has_secrets
from heterodyne.text_files import write_text

__all__ = ["train_job"]

_INTERRUPTED = 130


def train_job(
    job: Job,
    base: Path,
    *,
    name: str,
    cluster_file: Path | None,
    given: Plan | None,
    run_dir: Path | None,
    resume: bool,
    replan: bool = False,
    restarted: bool = False,
) -> int:
    """Train a job on the devices of the session. Returns 0, or 130 if it was stopped on request.

    ``name`` is that of the run directory where none is given. With ``resume`` the run goes on from its newest whole checkpoint;
    the plan that it was made under is kept if the cluster is the same, unless it is to ``replan``. ``restarted``: the directory may not be
    there yet. Of a job with sites it is what the one does that `training.sync` names as ``site``.
    """
    whole, job = job, job.here
    sync = job.training.sync
    arithmetic = open_session(cluster_file, deterministic=job.training.deterministic, tf32=job.training.tf32)
    with arithmetic as opened, ExitStack() as stack:
        run, disks = open_job_run(opened, name, run_dir, resume=resume, restarted=restarted)
        with _gone_if_unused(run, disks), _alone_in(run, disks), noted_shortage(opened, run):
            opened.say(f"run directory {run.path}")
            shortages = lacked_so_far(opened, run, disks) if resume else ()
            learned = () if given is not None else shortages  # a plan that is given is obeyed
            session = replace(opened, cluster=as_learned(opened.cluster, learned))
            data = stack.enter_context(closing(open_data(session, whole, base)))
            if sync is not None and sync.site is not None:
                data = SiteData(data, sync.first_of(sync.site), job.training.global_batch_size)
            found = _checkpoint(session, run) if resume else None
            if found is not None:
                job = _continuing(session, job, data, found)
            if found is not None and _is_complete(session, run, job, found):
                session.say(f"all {found.step} steps are done and {run.path} is complete: there is nothing left to do")
                return 0
            source = capture_job(session, job, base, data, example_of=longest_step(shortages) or 0)
            graph = source.captured.graph
            if sync is not None:
                require_apart(graph, sync)
            if given is not None:
                given = bind(given, graph, session.cluster)
            kept, profile = _kept(session, run, graph, given, shortages) if resume and not replan else (None, None)
            if replan:
                session.say("planning again, as asked: measuring again")
            if given is None:
                given = kept
            with told_with_shortages(shortages):
                prepared = prepare(
                    session, source.captured, source.whole, settings_of(job, session), given=given, profile=profile
                )
            if prepared.planned is not None:
                show_result(result_of(prepared.planned), session.cluster)
            written = whole.model_copy(update={"optimizer": job.optimizer})
            if kept is None:  # else it stands there as it was, with the reasons of that time
                session.agreement.only_on_rank0(lambda: _write_down(run, written, base, session, prepared))
            else:
                session.agreement.only_on_rank0(lambda: _write_job(run, written, base))
            outcome = _train(session, run, whole, job, base, data, prepared, found, same_plan=kept is not None)
            return _INTERRUPTED if outcome.interrupted else 0


@contextmanager
def _gone_if_unused(run: RunDirectory, disks: Disks) -> Iterator[None]:
    """Leave no empty directory behind where a mistake in the job ended the run before it began."""
    try:
        yield
    except HeterodyneError:
        if disks.agreement.rank in disks.firsts:
            with suppress(OSError):  # it is not empty: the run had begun
                run.path.rmdir()
        raise


@contextmanager
def _alone_in(run: RunDirectory, disks: Disks) -> Iterator[None]:
    with ExitStack() as stack:
        disks.on_each(lambda: stack.enter_context(occupied(run.path)))
        yield


def _checkpoint(session: Session, run: RunDirectory) -> Checkpoint | None:
    """The newest whole one, looked at before anything of the run is touched."""
    with session.phase("reading a checkpoint"):
        found = Checkpoints(run.checkpoints, agreement=session.agreement, say=session.say).latest()
    if found is None:
        session.agreement.only_on_rank0(run.require_unbegun)
        session.say("there is no checkpoint yet: the run starts from its beginning")
    return found


def _continuing(session: Session, job: Job, data: DataSource, found: Checkpoint) -> Job:
    """The job as it goes on from there. Raises CheckpointError if the checkpoint is of another job or of other data."""
    continued = job.continuing(found.manifest.identity.get("job", {}))
    found.require(identity_of(continued, data))
    if continued.schedule_steps != job.schedule_steps and job.optimizer.schedule == "cosine":
        session.say(
            f"the learning rate keeps its schedule over {continued.schedule_steps} steps, and stays at its end for those after "
            "(optimizer.schedule_steps)"
        )
    return continued


def _is_complete(session: Session, run: RunDirectory, job: Job, found: Checkpoint) -> bool:
    def summed_up() -> int | None:
        try:
            steps = read_json(run.summary)["steps"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return steps if isinstance(steps, int) else None

    # The summary is the last thing that is written. That of a run which has been extended since is of an earlier step.
    return session.agreement.on_rank0(
        lambda: found.step >= job.training.steps and run.model.is_dir() and summed_up() == found.step
    )


def _kept(
    session: Session, run: RunDirectory, graph: ModelGraph, given: Plan | None, shortages: Sequence[Shortage]
) -> tuple[Plan | None, Profile | None]:
    """The plan of the run so far, unless another one is given, and what was measured for it; for this model and this cluster.

    After ``shortages`` the cluster has learned that devices have less memory, for which the model is planned again, and not measured.
    """
    longer = longest_step(shortages) is not None

    def read() -> tuple[Plan | None, Profile | None, str]:
        try:
            plan, profile = Plan.load(run.plan), Profile.load(run.profile)
        except HeterodyneError:
            return None, None, "the run so far has no plan yet: measuring again"
        if plan.model != graph.fingerprint and longer:
            return None, None, "planning again for longer samples, of which nothing is known yet: measuring again"
        if plan.model != graph.fingerprint:
            return None, None, "the model has been changed since the run was planned: measuring again"
        if plan.cluster != session.cluster.fingerprint and shortages and _measured_here(profile, session):
            return None, profile, "planning again: no device is given more than it was seen to have"
        if plan.cluster != session.cluster.fingerprint:
            return None, None, "the cluster is not the one of the run so far: measuring again"
        if given is not None and differences(plan, given):
            return None, profile, "going on under the given plan, which is another one than that of the run so far"
        return plan, profile, "going on under the plan of the run so far"

    plan, profile, told = session.agreement.on_rank0(read)
    session.say(told)
    return plan, profile


def _measured_here(profile: Profile, session: Session) -> bool:
    return list(profile.devices) == [device.id for device in session.cluster.devices]


def _write_job(run: RunDirectory, job: Job, base: Path) -> None:
    """As it is planned and trained, with the directory in which its relative paths start."""
    kept = job.model_copy(update={"relative_to": str(base.resolve())})
    content = kept.model_dump(mode="json", exclude_none=True)
    try:
        write_text(run.job, yaml.safe_dump(content, sort_keys=False), private=has_secrets(content))
    except OSError as error:
        raise HeterodyneError(
            f"{run.job} cannot be written ({error.strerror}); make the run directory writable"
        ) from error


def _write_down(run: RunDirectory, job: Job, base: Path, session: Session, prepared: Prepared) -> None:
    """Everything that is known before the first step. On rank 0. Raises HeterodyneError if it cannot be written."""
    try:
        _write_job(run, job, base)
    except OSError as error:
        raise HeterodyneError(
            f"{error.filename or run.path} cannot be written ({error.strerror}); make room or make the run directory writable"
        ) from error
    write_plan_files(run, session, prepared)


def _train(
    session: Session,
    run: RunDirectory,
    whole: Job,
    job: Job,
    base: Path,
    data: DataSource,
    prepared: Prepared,
    found: Checkpoint | None,
    *,
    same_plan: bool,
) -> Outcome:
    first = session.rank == 0
    with session.phase("building the model"):
        recorder = Recorder(rank=session.rank, device=session.device)
        with told_while_building(session, prepared):
            worker = job_worker(session, job, base, prepared, recorder)
    reporter: Reporter = reporter_for(sys.stderr, total=job.training.steps) if first else SilentReporter(0)
    ideal = None if prepared.planned is None else sum(prepared.planned.rates.values())
    trainer = Trainer(
        worker=worker,
        data=data,
        job=job,
        plan=prepared.lowered.plan,
        run=run,
        agreement=session.agreement,
        reporter=reporter,
        ideal_samples_per_s=ideal,
        phase=session.phase,
        sites=_sites(session, worker, whole, data),
    )
    if found is not None:
        with told_while_building(session, prepared):
            trainer.resume(found, same_plan=same_plan)
    with orderly_stop("the beginning of training", LONGEST_PHASE_S, session.say) as stop:
        with rescued_if_memory_ends(session, trainer.rescue):
            outcome = trainer.train()
        stop.begin("what is left of the run: its weights and its report", LONGEST_PHASE_S)
        trainer.export()
        with session.phase("gathering the timeline"):
            timeline = recorder.timeline(session.communicator, [device.id for device in session.cluster.devices])
        if timeline is not None:
            timeline.save(run.timeline("measured"))
        if first:
            _summarise(run, prepared.captured.graph, outcome)
    return outcome


def _sites(session: Session, worker: Worker, whole: Job, data: DataSource) -> Sites | None:
    """The other sites of a job, if it has some."""
    if whole.training.sync is None:
        return None
    return Sites(
        worker,
        session.communicator,
        session.agreement,
        whole,
        data.identity,
        secret=(given_secret(os.environ) or secret_of_user()).encode(),
        say=session.say,
        phase=session.phase,
    )


def _summarise(run: RunDirectory, graph: ModelGraph, outcome: Outcome) -> None:
    """Write summary and report, and print what came out. On rank 0."""
    write_summary(run, graph, outcome)
    page = write_report(run.path)
    loaded = load_run(run.path)
    comparison = compare(loaded)
    show(summary_rows(loaded, comparison), prediction_rows(comparison))
    sys.stdout.write(f"report: {printable(str(page))}\n")
