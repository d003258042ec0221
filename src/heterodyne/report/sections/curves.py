"""What was measured before planning: a chart for each kind of block, a line for each device."""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cluster import BlockSample
from heterodyne.cluster.profile import WHOLE
from heterodyne.report.line_chart import LineChart, Series, line_chart
from heterodyne.report.palette import SERIES
from heterodyne.report.run import Run
from heterodyne.report.words import seconds

__all__ = ["curve_charts"]


def curve_charts(run: Run) -> list[LineChart]:
    """Seconds of forward plus backward over the micro-batch size, a chart for each kind of block, a line for each device."""
    if run.profile is None:
        return []
    kinds = dict.fromkeys(kind for device in run.profile.devices.values() for kind in device.blocks)
    charts = []
    for kind in sorted(kinds, key=lambda k: k != WHOLE):
        series: list[Series] = []
        sizes: set[int] = set()
        for index, (name, device) in enumerate(run.profile.devices.items()):
            samples = device.blocks.get(kind, ())
            sizes |= {s.micro_batch_size for s in samples}
            series += _curves(name, samples, index % SERIES)
        title = "The whole model" if kind == WHOLE else run.profile.kinds.get(kind, kind)
        charts.append(
            line_chart(
                title,
                series,
                x_title="samples in the micro-batch",
                y_title="forward + backward",
                y_text=seconds,
                y_tick=seconds,
                include_y=(0.0,),
                x_ticks=sorted(sizes),
            )
        )
    return [chart for chart in charts if chart is not None]


def _curves(name: str, samples: Sequence[BlockSample], colour: int) -> list[Series]:
    """Return what was measured as a line with dots; what was only continued from it dashed."""
    points = [(float(s.micro_batch_size), s.forward_s + s.backward_s) for s in samples]
    known = sum(not s.extrapolated for s in samples)
    return [
        Series(name=name, points=tuple(points[:known]), colour=colour),
        Series(name="", points=tuple(points[:known]), colour=colour, mark="dots"),
        Series(name="", points=tuple(points[max(0, known - 1) :]) if known < len(points) else (), colour=colour, mark="dashed"),
    ]  # fmt: skip
