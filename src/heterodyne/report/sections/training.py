"""Loss, efficiency, learning rate and gradient norm over the steps."""

from __future__ import annotations

from heterodyne.report.line_chart import LineChart, Series, line_chart, smoothed
from heterodyne.report.run import Metrics, Run
from heterodyne.report.words import digits, percent

__all__ = ["efficiency_chart", "loss_chart", "norm_chart", "rate_chart", "training_lead"]


def loss_chart(run: Run, reference: Metrics | None = None) -> LineChart | None:
    """Training loss (each step faint, a running mean strong), validation loss, and the run on one device beside it."""
    series: list[Series] = []
    if reference is not None:
        # Wide and beneath: where the two runs agree, the one on top must not hide the other.
        strong = _loss_of(reference, "one device", 2)[-1]
        points = tuple((float(v.step), v.loss) for v in reference.validations)
        series += [
            Series(name=strong.name, points=strong.points, colour=2, mark="band"),
            Series(name="one device, validation", points=points, colour=2, mark="wide-dots"),
        ]
    series += _loss_of(run.metrics, "training", 0)
    series += [
        Series(
            name="validation",
            points=tuple((float(v.step), v.loss) for v in run.metrics.validations),
            colour=1,
            mark="dots",
        )
    ]
    return line_chart("Loss over steps", series, x_title="step", y_title="loss")


def training_lead(run: Run, reference: Metrics | None = None) -> str:
    """The losses at the end, in a sentence, and which ranks and links have become slower on the way."""
    parts = [
        f"{who}: training {digits(m.steps[-1].loss, 4)}"
        + (f", validation {digits(m.validations[-1].loss, 4)}" if m.validations else "")
        for who, m in (("this run", run.metrics), ("one device on the same batches", reference))
        if m is not None and m.steps
    ]
    found = [
        f"Step {step}: {words or 'all ranks and links are as fast as before again'}."
        for step, words in run.metrics.slower
    ]
    lead = f"Loss at the end. {'; '.join(parts)}.".replace("this run", "This run") if parts else ""
    return " ".join(filter(None, [lead, *found]))


def rate_chart(run: Run) -> LineChart | None:
    """The learning rate of each step."""
    points = tuple((float(s.step), s.lr) for s in run.metrics.steps if s.lr is not None)
    return line_chart(
        "Learning rate over steps",
        [Series(name="learning rate", points=points, colour=0)],
        x_title="step",
        y_title="learning rate",
    )


def norm_chart(run: Run) -> LineChart | None:
    """The global norm of the gradient before clipping, and what it is clipped to."""
    points = tuple((float(s.step), s.grad_norm) for s in run.metrics.steps if s.grad_norm is not None)
    series = [Series(name="gradient norm", points=points, colour=0)]
    largest = run.job.training.clip_grad_norm if run.job is not None else 0.0
    if points and largest:
        ends = tuple((x, largest) for x in dict.fromkeys((points[0][0], points[-1][0])))
        series.append(Series(name="clipped to", points=ends, colour=1, mark="dashed"))
    return line_chart("Gradient norm over steps", series, x_title="step", y_title="gradient norm")


def _loss_of(metrics: Metrics, name: str, colour: int) -> list[Series]:
    points = tuple((float(s.step), s.loss) for s in metrics.steps if s.loss is not None)
    window = max(1, len(points) // 40)
    if window == 1:
        return [Series(name=name, points=points, colour=colour)]
    return [
        Series(name="", points=points, colour=colour, mark="faint"),
        Series(name=f"{name}, mean of {window} steps", points=smoothed(points, window), colour=colour),
    ]


def efficiency_chart(run: Run) -> LineChart | None:
    """Efficiency of each step on an axis from 0, where 100 % is the sum of what the devices reach alone."""
    points = tuple((float(s.step), s.efficiency) for s in run.metrics.steps if s.efficiency is not None)
    predicted = run.plan.predicted.efficiency if run.plan and run.plan.predicted else None
    series = [Series(name="measured", points=points, colour=0)]
    if predicted is not None and points:
        ends = tuple((x, predicted) for x in dict.fromkeys((points[0][0], points[-1][0])))
        series.append(Series(name="predicted", points=ends, colour=1, mark="dashed"))
    return line_chart(
        "Efficiency over steps",
        series if points else [],
        x_title="step",
        y_title="efficiency",
        y_text=percent,
        y_tick=lambda value: f"{100 * value:.0f} %",
        include_y=(0.0, 1.0),
        snug_y=True,
    )
