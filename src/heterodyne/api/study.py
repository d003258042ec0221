"""``heterodyne study``: how a job scales over devices under each strategy, on paper or in worker processes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from heterodyne.api.paper_costs import captured, with_datasheets
from heterodyne.api.paper_devices import FEW_DEVICES, by_datasheets, planned_by_device
from heterodyne.api.printing import candidate_lines, show
from heterodyne.api.workers import command_of
from heterodyne.cluster.catalog import find
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.fleet import Fleet, Pool
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.profile import Profile
from heterodyne.cluster.spec import Cluster
from heterodyne.cluster.written import cluster_to_yaml
from heterodyne.errors import ClusterError, HeterodyneError, InfeasibleError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.job import Job, ParallelismSection, Strategy
from heterodyne.plan.plan import Plan
from heterodyne.processes.command import run_logged
from heterodyne.processes.status import OUT_OF_MEMORY, STOPPED, TOLD, describe_exit
from heterodyne.report.compare import compare
from heterodyne.report.run import Candidate, candidates_from, load_run
from heterodyne.report.study import Cell, Figures, Origin, Study
from heterodyne.report.study_shown import study_picture, study_rows
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.records.run_lock import occupied
from heterodyne.search.explain import result_of
from heterodyne.text_files import read_text, write_text
from heterodyne.units import counted, format_seconds

__all__ = ["StudyWishes", "study_job"]

_MOST_LOG_BYTES: Final = 2**24


@dataclass(frozen=True, kw_only=True)
class StudyWishes:
    """What is asked for.

    Args:
        counts: of devices, by rising number; the first so many of the cluster, of the machine, or of the emulated workers.
        strategies: as in ``parallelism.strategy``.
        cluster_file: None: the devices of this machine, or the emulated workers.
        profile: measurements of the devices of the file; None: their datasheets.
        steps: so many are run of each cell; None: nothing is run.
        speeds: of emulated workers, on which cells are run; none: on the devices themselves.
        overrides: of the job, as the command line gives them.
        out: the study. ``picture``: what its suffix says.
    """

    counts: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    cluster_file: Path | None
    profile: Path | None
    steps: int | None
    speeds: tuple[float, ...]
    overrides: tuple[str, ...]
    out: Path
    picture: Path


def study_job(job: Job, file: Path, wishes: StudyWishes, say: Callable[[str], None]) -> int:
    """Fill in each cell that is not known yet, writing the study after each, and show it. Return the exit status: that of a run which
    was interrupted, else 0.

    Raises HeterodyneError for what would make every cell fail; what makes one fail is written into it.
    """
    studied = _Studied(job=job, file=file, wishes=wishes)
    studied.require_devices()
    study = studied.begun()
    failed: list[str] = []
    try:
        for strategy in wishes.strategies:
            for count in wishes.counts:
                study = studied.as_it_stands(study)  # another command may have written cells meanwhile
                if study.done(count, strategy, studied.origin):
                    continue
                say(f"{counted(count, 'device')}, {strategy} ...")
                try:
                    cell = studied.cell(count, strategy)
                except _FailedError as error:
                    failed.append(f"{counted(count, 'device')}, {strategy}: {error}")
                    continue
                study = studied.as_it_stands(study)
                study.require_same_model(cell, wishes.out)
                study = study.with_cell(cell)
                study.save(wishes.out)
                say(f"{counted(count, 'device')}, {strategy}: {_told(cell)}")
    except _InterruptedError as end:
        say(f"{wishes.out} has the {counted(len(study.cells), 'cell')} that are done: the same command goes on")
        return end.status
    show(study_rows(study))
    if any(cell.figures is not None for cell in study.cells):
        say(f"wrote {wishes.out} and {study_picture(study, wishes.picture)}")
    if failed:
        raise HeterodyneError("\n  ".join(["runs have failed, and the same command tries them again:", *failed]))
    return 0


class _FailedError(Exception):
    """A run that has ended without a message of what is wrong."""


class _InterruptedError(Exception):
    """Somebody has asked a run to stop."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class _Studied:
    """One command."""

    job: Job
    file: Path
    wishes: StudyWishes

    @property
    def base(self) -> Path:
        return self.job.base(self.file)

    @property
    def origin(self) -> Origin:
        if self.wishes.steps is not None:
            return "run"
        return "datasheets" if self.wishes.profile is None else "profile"

    def begun(self) -> Study:
        """Return the study without a cell."""
        content = self.job.model_dump(mode="json", include={"model", "data", "training", "optimizer", "parallelism"})
        del content["parallelism"]["strategy"]
        paid = [(pool.usd_per_device_hour, pool.watts_per_device) for pool in self._fleet.pools] if self._fleet else []
        there = None if self._cluster is None else self._cluster.fingerprint
        measured = "" if self.wishes.profile is None else _digest(read_text(self.wishes.profile))
        return Study(
            name=self.file.stem,
            job=_digest(content),
            cluster=_digest([there, paid]),
            batch=self.job.training.global_batch_size,
            profile=measured,
            speeds=self.wishes.speeds,
        )

    def as_it_stands(self, study: Study) -> Study:
        """Return the study with the cells that its file has now. Raises FileError for a file of something else."""
        out = self.wishes.out
        return study.going_on(Study.load(out), out) if out.exists() else study

    def require_devices(self) -> None:
        """Raises ClusterError for more devices than there are, or than are searched one by one, and where nothing is known of them."""
        there, wanted = self._count, self.wishes.counts[-1]
        where = self.wishes.cluster_file or ("--speeds" if self.wishes.speeds else "this machine")
        if self.wishes.speeds and self._cluster is not None and len(self.wishes.speeds) != len(self._cluster.devices):
            raise ClusterError(
                f"--speeds has {counted(len(self.wishes.speeds), 'worker')}, and {self.wishes.cluster_file} "
                f"{counted(len(self._cluster.devices), 'device')}: write a speed for each"
            )
        if wanted > there:
            raise ClusterError(f"--devices {wanted}: {where} has {counted(there, 'device')}; ask for fewer")
        if wanted > FEW_DEVICES and self.wishes.steps is None:
            raise ClusterError(
                f"--devices {wanted}: strategies are compared for {FEW_DEVICES} devices at most; for larger fleets, "
                "'heterodyne plan JOB --cluster FLEET --families' shows the best of each kind of plan"
            )

        if self.origin == "datasheets" and self._fleet is not None:
            with_datasheets(self._fleet)

    def cell(self, count: int, strategy: Strategy) -> Cell:
        """Raises _InterruptedError or _FailedError."""
        cell = Cell(devices=count, strategy=strategy, origin=self.origin)
        return self._ran(cell) if self.origin == "run" else self._planned(cell)

    def _planned(self, cell: Cell) -> Cell:
        cluster, profile = self._known
        few = cluster.only([device.id for device in cluster.devices[: cell.devices]])
        try:
            parallelism = ParallelismSection(**{**self.job.parallelism.model_dump(), "strategy": cell.strategy})
        except ValidationError as error:
            return replace(cell, refused=error.errors()[0]["msg"].removeprefix("Value error, "))
        job = self.job.model_copy(update={"parallelism": parallelism})
        try:
            planned = planned_by_device(job, few, profile, self._graph)
        except (InfeasibleError, PlanError) as error:
            return replace(cell, refused=str(error))
        cell = self._with_plan(cell, planned.plan, candidates_from(candidate_lines(result_of(planned))), few)
        own = planned.plan.predicted
        assert own is not None  # the search predicts what it finds
        figures = Figures(
            step_s=own.step_s,
            samples_per_s=own.samples_per_s,
            efficiency=own.efficiency,
            memory_bytes=max(own.memory_bytes.values(), default=None),
        )
        return replace(cell, predicted=figures)

    def _ran(self, cell: Cell) -> Cell:
        """The cell from a run of its own, in processes of its own, which leave their plan, their report and their log."""
        runs = self.wishes.out.with_suffix(".runs")
        run, log = RunDirectory(runs / f"{cell.devices}-{cell.strategy}"), runs / f"{cell.devices}-{cell.strategy}.log"
        runs.mkdir(parents=True, exist_ok=True)
        with occupied(runs, option="--out"):
            shutil.rmtree(run.path, ignore_errors=True)  # of a study that was interrupted in it
            status, stopped = run_logged(self._command(cell, run), log)
        if stopped:
            raise _InterruptedError(status or STOPPED)
        if status in (TOLD, OUT_OF_MEMORY):
            return replace(cell, refused=_message_in(log))
        if status:
            raise _FailedError(f"its run {describe_exit(status)}, see {log}")
        found = load_run(run.path)
        assert found.plan is not None
        step, rate, efficiency = compare(found).run
        held = compare(found).memory
        for directory in (run.checkpoints, run.model):  # of so few steps nobody wants the weights
            shutil.rmtree(directory, ignore_errors=True)
        cell = self._with_plan(cell, found.plan, found.candidates, found.cluster)
        sides = [
            Figures(step_s=s, samples_per_s=r, efficiency=e, memory_bytes=max(known, default=None)) if s and r else None
            for s, r, e, known in (
                (step.predicted, rate.predicted, efficiency.predicted, [int(m.predicted) for m in held if m.predicted]),
                (step.measured, rate.measured, efficiency.measured, [int(m.measured) for m in held if m.measured]),
            )
        ]
        return replace(cell, predicted=sides[0], measured=sides[1])

    def _command(self, cell: Cell, run: RunDirectory) -> tuple[str, ...]:
        """``heterodyne train`` of a few steps, on the first devices or on as many emulated workers."""
        sets = (
            *self.wishes.overrides,
            f"parallelism.strategy={cell.strategy}",
            f"training.steps={self.wishes.steps}",
            "training.validate_every=0",
            "training.on_out_of_memory=stop",
            "checkpoint.every=0",
            "metrics.every=1",
            "metrics.tensorboard=false",
            "metrics.trackers=[]",
        )
        train = ["train", str(self.file), "--run-dir", str(run.path), *(w for s in sets for w in ("--set", s))]
        if self._cluster is not None:
            few = run.path.with_suffix(".cluster.yaml")
            write_text(few, cluster_to_yaml(self._cluster.only(d.id for d in self._cluster.devices[: cell.devices])))
            train += ["--cluster", str(few)]
        if not self.wishes.speeds:
            return command_of(train)
        speeds = ",".join(f"{speed:g}" for speed in self.wishes.speeds[: cell.devices])
        return command_of(["emulate", "--speeds", speeds, "--", *command_of(train)])

    def _with_plan(
        self,
        cell: Cell,
        plan: Plan,
        candidates: tuple[Candidate, ...],
        cluster: Cluster | None,
    ) -> Cell:
        """With what is known of the plan, of the devices, and of those that take part."""
        assert cluster is not None
        assert plan.predicted is not None
        pools = [self._pool(cluster, device) for device in plan.devices]
        kinds = [cluster.device(device).kind for device in plan.devices]
        prices = [None if pool is None else pool.usd_per_device_hour for pool in pools]
        watts = [
            (known.tdp_w if (known := find(kind)) else None) if pool is None else pool.watts_per_device
            for kind, pool in zip(kinds, pools, strict=True)
        ]
        alone = [c.samples_per_s for c in candidates if c.devices == 1 and c.samples_per_s]
        return replace(
            cell,
            plan=next((c.name for c in candidates if c.chosen), ""),
            model=plan.model,
            bound_samples_per_s=plan.predicted.bound_samples_per_s,
            alone_samples_per_s=max(alone, default=None),
            usd_per_hour=_sum(prices),
            watts=_sum(watts),
            traffic_usd=self._traffic_usd(plan),
        )

    def _pool(self, cluster: Cluster, device: str) -> Pool | None:
        found = cluster.device(device)
        return self._pools.get((found.node, found.kind))

    def _traffic_usd(self, plan: Plan) -> float:
        """Return what the traffic of a step between places costs."""
        fleet, total = self._fleet, 0.0
        for ends, size in (plan.predicted.traffic if fleet and fleet.usd_per_byte and plan.predicted else {}).items():
            a, b = (
                next((p for (node, _), p in self._pools.items() if node == end), None) for end in ends.split(" -> ")
            )
            total += size * fleet.traffic_usd_per_byte(a, b) if fleet and a and b else 0.0
        return total

    @cached_property
    def _fleet(self) -> Fleet | None:
        return None if self.wishes.cluster_file is None else load_fleet(self.wishes.cluster_file)

    @cached_property
    def _pools(self) -> Mapping[tuple[str, str], Pool]:
        """The pool of the devices of a kind in a node."""
        pools = self._fleet.pools if self._fleet else ()
        return {(node, pool.kind): pool for pool in pools for node in pool.node_names}

    @cached_property
    def _cluster(self) -> Cluster | None:
        """The devices; None for emulated workers of which no file says anything, and of a machine with a single device."""
        if self.wishes.cluster_file is not None:
            return load_cluster(self.wishes.cluster_file)
        if self.wishes.speeds:
            return None
        from heterodyne.measure.discover import discover_machine

        here = discover_machine()
        accelerators = [device.id for device in here.devices if device.backend != "cpu"]
        return here.only(accelerators) if accelerators else None

    @property
    def _count(self) -> int:
        return len(self._cluster.devices) if self._cluster is not None else len(self.wishes.speeds) or 1

    @cached_property
    def _graph(self) -> ModelGraph:
        return captured(self.job, self.base)

    @cached_property
    def _known(self) -> tuple[Cluster, Profile]:
        """The devices of the file, and their measurements or what datasheets tell of them."""
        assert self._fleet is not None
        assert self._cluster is not None
        if self.wishes.profile is None:
            return by_datasheets(self.job, self._fleet, self._graph)
        profile, precision = Profile.load(self.wishes.profile), self.job.training.precision
        asked = {device.id: precision for device in self._cluster.devices[: self.wishes.counts[-1]]}
        if precision != "auto":
            profile.require(asked)
        return self._cluster, profile


def _told(cell: Cell) -> str:
    if cell.figures is None:
        return f"none: {cell.refused}"
    return f"{format_seconds(cell.figures.step_s)} a step; {cell.plan}"


def _message_in(log: Path) -> str:
    """The message with which a run has ended."""
    lines = read_text(log, most_bytes=_MOST_LOG_BYTES, errors="replace").splitlines()
    told = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    if not told:
        return f"see {log}"
    first, *more = lines[told[-1] :]
    more = [line for line in more if line.startswith(" ")]
    return "\n".join([first.removeprefix("error: "), *more])


def _sum(values: Sequence[float | None]) -> float | None:
    """None where any is not known."""
    return None if None in values else sum(value or 0.0 for value in values)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
