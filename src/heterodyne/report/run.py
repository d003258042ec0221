"""A run directory, read back: whatever is there, and a sentence for whatever is not.

A run that was killed leaves some files missing and some cut short. Neither is an error here: what can be read is read, and
`Run.missing` says what could not be. Only a directory that holds none of a run's files is refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from heterodyne.cluster import Cluster, Profile
from heterodyne.errors import HeterodyneError
from heterodyne.job import Job
from heterodyne.json_files import checked, parse_json, read_json
from heterodyne.plan import Plan
from heterodyne.report.plan_shares import samples_of
from heterodyne.run_directory import RunDirectory
from heterodyne.secret_names import has_secrets, without_secrets
from heterodyne.text_files import read_text
from heterodyne.timeline import Timeline
from heterodyne.yaml_text import YamlFaultError, parse_yaml

__all__ = [
    "Candidate",
    "Metrics",
    "OuterMetrics",
    "Run",
    "StepMetrics",
    "ValidationLoss",
    "candidates_from",
    "load_run",
    "read_metrics",
]

_FINITE = 1e300  # of what may be added and squared; NaN is not below it either


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One line of metrics; None for what the line does not say. ``step_s`` is of the whole step, ``memory_bytes`` of rank 0."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    efficiency: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationLoss:
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterMetrics:
    """An outer step with other sites: which took part, and what it cost this one."""

    number: int
    sites: tuple[str, ...]
    bytes: float
    wait_s: float
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Lines by rising step; of a step that was trained twice (killed, then resumed) the last line counts. ``slower``: which ranks and
    links, as found after a step; "" if none is any more. ``outer``: outer steps with other sites, by their number."""

    steps: tuple[StepMetrics, ...] = ()
    validations: tuple[ValidationLoss, ...] = ()
    slower: tuple[tuple[int, str], ...] = ()
    outer: tuple[OuterMetrics, ...] = ()
    unreadable: int = 0

    def median(self, name: str) -> float | None:
        """The median over the steps of one field, None where no line has it."""
        values = [v for s in self.steps if (v := getattr(s, name)) is not None and math.isfinite(v)]
        return statistics.median(values) if values else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that was weighed. ``step_s`` and ``samples_per_s`` are predictions, None for one that does not fit; ``plan``: if known;
    ``devices``: how many take part, None where that was not written down.
    """

    name: str
    step_s: float | None = None
    samples_per_s: float | None = None
    chosen: bool = False
    why: str = ""
    plan: Plan | None = None
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that is known of a run.

    Args:
        job_text: the job file as it stands, but for secrets; "" if it is not there.
        summary: what the run wrote at its end. Read here, each optional: ``model``, ``parameters``, ``seconds``, ``interrupted``,
            ``peak_memory_bytes`` (bytes in order of rank, or a mapping from device to bytes) and ``environment`` (a mapping
            from name to text).
        missing: sentences that say what could not be read.
    """

    directory: Path
    job: Job | None = None
    job_text: str = ""
    cluster: Cluster | None = None
    plan: Plan | None = None
    candidates: tuple[Candidate, ...] = ()
    profile: Profile | None = None
    metrics: Metrics = Metrics()
    measured: Timeline | None = None
    simulated: Timeline | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def devices(self) -> tuple[str, ...]:
        """Device ids by rank, from whichever file says it."""
        if self.cluster is not None:
            return tuple(device.id for device in self.cluster.devices)
        timeline = self.measured or self.simulated
        if timeline is not None:
            return timeline.devices
        return (*self.plan.devices, *self.plan.idle) if self.plan is not None else ()

    @property
    def samples(self) -> dict[str, int]:
        """The samples of a step that each device works on; empty without a plan.

        The stages of a pipeline all work on its whole share, the devices of one stage on parts of it.
        """
        if self.plan is None:
            return {}
        return {**dict.fromkeys(self.plan.idle, 0), **samples_of(self.plan)}

    @property
    def speed_up_over_equal(self) -> float | None:
        """Predicted samples/s of the chosen plan over those of equal shares, None if either was not weighed."""
        chosen = next((c.samples_per_s for c in self.candidates if c.chosen), None)
        equal = next((c.samples_per_s for c in self.candidates if c.name.lower().startswith("equal")), None)
        return chosen / equal if chosen and equal else None

    @property
    def peak_memory(self) -> dict[str, float]:
        """Measured peak bytes of each device: from the summary, else those of rank 0 from the metrics."""
        peaks = self.summary.get("peak_memory_bytes")
        if isinstance(peaks, list):
            peaks = dict(zip(self.devices, peaks, strict=False))
        told = [s.memory_bytes for s in self.metrics.steps if s.memory_bytes is not None]
        if peaks is None and told and self.devices:
            return {self.devices[0]: max(told)}
        return {str(k): float(v) for k, v in peaks.items() if _is_number(v)} if isinstance(peaks, Mapping) else {}


def load_run(directory: Path) -> Run:
    """Read a run directory. Raises HeterodyneError if it is not one; never for a file that is missing or cut short."""
    files = RunDirectory(directory)
    _require_run(files)
    missing: list[str] = []
    content = _Reader(missing)
    metrics = _metrics(content, files.metrics)
    return Run(
        directory=directory,
        job=content.of(files.job, lambda path: Job.load(path).here),
        job_text=_shown(content.of(files.job, _text, "what was trained is not known") or ""),
        cluster=content.of(files.cluster, _cluster, "the devices are not described"),
        plan=content.of(files.plan, Plan.load, "shares and predictions are not known"),
        candidates=content.of(files.candidates, _candidates, "the plans that were weighed are not known") or (),
        profile=content.of(files.profile, Profile.load, "what was measured before planning is not shown"),
        metrics=metrics,
        measured=content.of(files.timeline("measured"), Timeline.load, "what each device did is not known"),
        simulated=content.of(files.timeline("simulated"), Timeline.load, "what each device should do is not shown"),
        summary=content.of(files.summary, _mapping, "the run did not come to its own end") or {},
        missing=tuple(missing),
    )


def read_metrics(path: Path) -> Metrics:
    """The lines of a ``metrics.jsonl``, or of the one in a run directory. Raises HeterodyneError if it is not there."""
    file = RunDirectory(path).metrics if path.is_dir() else path
    try:
        lines = read_text(file, most_bytes=2**30, errors="replace").splitlines()
    except OSError as error:
        raise HeterodyneError(f"{file}: cannot be read: {error.strerror}") from error
    steps: dict[int, StepMetrics] = {}
    validations: dict[int, ValidationLoss] = {}
    slower: dict[int, str] = {}
    outer: dict[int, OuterMetrics] = {}
    unreadable = 0
    for line in filter(str.strip, lines):
        fields = _line(line)
        step = fields.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
            unreadable += 1
            continue
        loss = fields.get("validation_loss")
        if _is_number(loss):
            validations[step] = ValidationLoss(step=step, loss=float(loss))
        if isinstance(fields.get("slower"), str):
            slower[step] = fields["slower"]
        if (merged := _outer(fields)) is not None:
            outer[merged.number] = merged
            continue
        known = {name: float(fields[name]) for name in StepMetrics.__slots__[1:] if _is_number(fields.get(name))}
        if known:
            steps[step] = StepMetrics(step=step, **known)
    return Metrics(
        steps=tuple(steps[s] for s in sorted(steps)),
        validations=tuple(validations[s] for s in sorted(validations)),
        slower=tuple((s, slower[s]) for s in sorted(slower)),
        outer=tuple(outer[number] for number in sorted(outer)),
        unreadable=unreadable,
    )


def candidates_from(rows: Iterable[Mapping[str, Any]]) -> tuple[Candidate, ...]:
    """Plain rows ``{name, step_s, samples_per_s, chosen, why, devices}`` as values. Raises KeyError for a row without a name."""
    return tuple(
        Candidate(
            name=str(row["name"]),
            step_s=_positive(row.get("step_s")),
            samples_per_s=_positive(row.get("samples_per_s")),
            chosen=bool(row.get("chosen", False)),
            why=str(row.get("why") or ""),
            devices=count if type(count := row.get("devices")) is int else None,
        )
        for row in rows
    )


class _Reader:
    """Reads the files of one directory and notes what could not be read."""

    def __init__(self, missing: list[str]) -> None:
        self.missing = missing

    def of(self, path: Path, read: Callable[[Path], Any], without: str = "") -> Any:
        if not path.is_file():
            if without:
                self.missing.append(f"{path.name} is missing: {without}.")
            return None
        try:
            return read(path)
        except (HeterodyneError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).removeprefix(f"{path}: ").splitlines()[0] if str(error) else type(error).__name__
            self.missing.append(f"{path.name} cannot be read and is left out ({reason}).")
            return None


def _text(path: Path) -> str:
    return read_text(path, errors="replace")


def _shown(text: str) -> str:
    """A job file as others may read it."""
    try:
        content, _ = parse_yaml(text)
    except YamlFaultError:  # nothing is known of what it holds
        return ""
    return yaml.safe_dump(without_secrets(content), sort_keys=False) if has_secrets(content) else text


def _require_run(run: RunDirectory) -> None:
    signs = (run.job, run.plan, run.metrics)
    looked_for = ", ".join(sign.name for sign in signs)
    if not run.path.is_dir():
        raise HeterodyneError(f"{run.path} is not a directory; give a run directory, which holds {looked_for}")
    if any(sign.is_file() for sign in signs):
        return
    inside = sorted(d.name for d in run.path.iterdir() if any((d / sign.name).is_file() for sign in signs))
    hint = f"; it holds runs, give one of them: {', '.join(inside[:5])}" if inside else ""
    raise HeterodyneError(f"{run.path} is no run: looked in it for {looked_for} and found none{hint}")


def _metrics(content: _Reader, file: Path) -> Metrics:
    metrics: Metrics = content.of(file, read_metrics, "no step is known") or Metrics()
    if metrics.unreadable:
        plural = "line is" if metrics.unreadable == 1 else "lines are"
        content.missing.append(f"{file.name}: {metrics.unreadable} {plural} cut short and left out.")
    if file.is_file() and not metrics.steps:
        content.missing.append(f"{file.name} holds no step: the run ended before its first.")
    return metrics


def _cluster(path: Path) -> Cluster:
    return checked(Cluster, {name: value for name, value in _mapping(path).items() if name != "version"})


def _candidates(path: Path) -> tuple[Candidate, ...]:
    return candidates_from(read_json(path))


def _mapping(path: Path) -> Mapping[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    return content


def _line(text: str) -> Mapping[str, Any]:
    try:
        content = parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _outer(fields: Mapping[str, Any]) -> OuterMetrics | None:
    number, sites = fields.get("outer_step"), fields.get("sites")
    told = [fields.get(name) for name in ("sent_bytes", "received_bytes", "wait_s", "time_s")]
    numbers = [float(each) for each in told if _is_number(each)]
    if not isinstance(number, int) or not isinstance(sites, str) or len(numbers) < len(told):
        return None
    sent, received, wait_s, time_s = numbers
    names = tuple(part.split()[0] for part in sites.split(",") if part.strip())
    return OuterMetrics(number=number, sites=names, bytes=sent + received, wait_s=wait_s, time_s=time_s)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FINITE


def _positive(value: Any) -> float | None:
    return float(value) if _is_number(value) and value > 0 else None
