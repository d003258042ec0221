"""The report of a run: one self-contained ``report.html`` that works offline, on paper and on a phone, and ``trace.json``.

Everything is laid out here as texts and places; the templates only put them into markup, and escape every text.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from heterodyne.errors import HeterodyneError
from heterodyne.report.compare import compare
from heterodyne.report.palette import DARK, DARK_STAGES, LIGHT, SERIES, STAGE_COLOURS, kind_key
from heterodyne.report.perfetto import write_trace
from heterodyne.report.run import Run, load_run, read_metrics
from heterodyne.report.sections.curves import curve_charts
from heterodyne.report.sections.devices import cluster_section
from heterodyne.report.sections.overview import key_figures, plan_section, status
from heterodyne.report.sections.predictions import prediction_section
from heterodyne.report.sections.sites import sites_section
from heterodyne.report.sections.stages import stage_section
from heterodyne.report.sections.timelines import timeline_section
from heterodyne.report.sections.times import time_section
from heterodyne.report.sections.training import efficiency_chart, loss_chart, norm_chart, rate_chart, training_lead
from heterodyne.report.words import kind_name, seconds, unbroken
from heterodyne.text_files import write_text

__all__ = ["render", "write_report"]


def write_report(run_dir: Path, out: Path | None = None, *, reference_metrics: Path | None = None) -> Path:
    """Write the page, and ``trace.json`` beside it; return the path of the page.

    Args:
        run_dir: the run directory; a run that was cut short is reported as far as it got.
        out: the page, or a directory for it; None: ``report.html`` in the run directory.
        reference_metrics: ``metrics.jsonl`` (or the run directory) of a one-device run of the same job, whose loss is drawn beside.

    Raises HeterodyneError if ``run_dir`` is no run or ``reference_metrics`` cannot be read.
    """
    run = load_run(run_dir)
    page = run_dir if out is None else out
    if page.is_dir() or (page.suffix == "" and not page.exists()):
        page = page / "report.html"
    text = render(run, reference_metrics=reference_metrics)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, text)
    write_trace(run, page.with_name("trace.json"))
    return page


def render(run: Run, *, reference_metrics: Path | None = None) -> str:
    """The page as text. Raises HeterodyneError if ``reference_metrics`` cannot be read."""
    environment = Environment(
        loader=PackageLoader("heterodyne.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    reference = read_metrics(reference_metrics) if reference_metrics is not None else None
    if reference is not None and not reference.steps:
        raise HeterodyneError(f"{reference_metrics} holds no step of a run; name a run directory, or its metrics.jsonl")
    comparison = compare(run)
    environment.filters |= {"kind_name": kind_name, "seconds": seconds, "kind_key": kind_key, "unbroken": unbroken}
    return environment.get_template("report.html").render(
        run=run,
        light=LIGHT,
        dark=DARK,
        stages=STAGE_COLOURS,
        dark_stages=DARK_STAGES,
        series=SERIES,
        status=status(run),
        figures=key_figures(run, comparison),
        sites=sites_section(run),
        cluster=cluster_section(run),
        plan=plan_section(run),
        timelines=timeline_section(run, comparison.step),
        times=time_section(run),
        pipeline=stage_section(run),
        prediction=prediction_section(comparison),
        loss=loss_chart(run, reference),
        training_lead=training_lead(run, reference),
        efficiency=efficiency_chart(run),
        rate=rate_chart(run),
        norm=norm_chart(run),
        command=_command(run),
        curves=curve_charts(run),
        environment=_environment(run),
    )


def _command(run: Run) -> str:
    """Return how the run is repeated: its own job under its own plan."""
    if run.job is None or run.plan is None:
        return ""
    return f"heterodyne train {run.directory / 'job.yaml'} --plan {run.directory / 'plan.json'}"


def _environment(run: Run) -> list[tuple[str, str]]:
    given = run.summary.get("environment")
    return [(str(k), str(v)) for k, v in given.items()] if isinstance(given, dict) else []
