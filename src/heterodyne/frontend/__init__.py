"""From an nn.Module to a ModelGraph."""

from heterodyne.frontend.block_program import BlockProgram
from heterodyne.frontend.stage_program import BoundStage, StageProgram
from heterodyne.frontend.stage_values import Value
from heterodyne.frontend.trace import Captured, capture, trace
from heterodyne.model_output import loss_of

__all__ = ["BlockProgram", "BoundStage", "Captured", "StageProgram", "Value", "capture", "loss_of", "trace"]
