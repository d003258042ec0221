"""What the model is: the ModelGraph, without weights and without torch."""

from heterodyne.graph.cut import Value, computed_again, crossings
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
from heterodyne.graph.task_graphs import TaskGraph, task_graph_runs

__all__ = [
    "Argument",
    "Block",
    "Input",
    "Loss",
    "ModelGraph",
    "ModuleOnly",
    "Op",
    "Parameter",
    "Ref",
    "Size",
    "TaskGraph",
    "TensorSpec",
    "Value",
    "computed_again",
    "crossings",
    "require_pieces",
    "task_graph_runs",
]
