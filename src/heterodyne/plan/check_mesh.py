"""What a stage with several axes has to keep to."""

from __future__ import annotations

from heterodyne.plan.plan import Stage

__all__ = ["faults_of_mesh"]


def faults_of_mesh(stage: Stage) -> list[str]:
    """Each rule that the axes of a stage break, as the end of a sentence about it."""
    layouts = [region.layout for region in stage.regions]
    if not any(layout.inner for layout in layouts):
        return []
    shown = ", ".join(f"{region.task_graph!r} {region.layout}" for region in stage.regions)
    if len({layout.sizes for layout in layouts}) > 1:
        return [f"has regions on different meshes ({shown}): write each with the same axes, as many members in each"]
    outer = stage.batch_axes
    if len({tuple(axis.shares for axis in layout.axes[:outer]) for layout in layouts}) > 1:
        return [
            f"shares samples over its rows in different ways ({shown}): give the outermost axes the same shares in all regions"
        ]
    return []
