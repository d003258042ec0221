"""What the model is: the ModelGraph, without weights and without torch."""

from heterodyne.graph.cut import Crossing, Value, computed_again, crossings
from heterodyne.graph.ir import Block, Input, Loss, ModelGraph, Op, Parameter, TensorSpec
from heterodyne.graph.size import Size

__all__ = [
    "Block",
    "Crossing",
    "Input",
    "Loss",
    "ModelGraph",
    "Op",
    "Parameter",
    "Size",
    "TensorSpec",
    "Value",
    "computed_again",
    "crossings",
]
