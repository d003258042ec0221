"""What the model is: the ModelGraph, without weights and without torch."""

from heterodyne.graph.cut import Crossing, Value, computed_again, crossings, stage_ops
from heterodyne.graph.ir import (
    Argument,
    Block,
    Input,
    Loss,
    ModelGraph,
    ModuleOnly,
    Op,
    Parameter,
    Ref,
    TensorSpec,
    require_pieces,
)
from heterodyne.graph.size import Size
from heterodyne.graph.task_graphs import TaskGraph, TaskGraphRun, task_graph_runs

__all__ = [
    "Argument",
    "Block",
    "Crossing",
    "Input",
    "Loss",
    "ModelGraph",
    "ModuleOnly",
    "Op",
    "Parameter",
    "Ref",
    "Size",
    "TaskGraph",
    "TaskGraphRun",
    "TensorSpec",
    "Value",
    "computed_again",
    "crossings",
    "require_pieces",
    "stage_ops",
    "task_graph_runs",
]
