"""From an nn.Module to a ModelGraph."""

from heterodyne.frontend.block_program import BlockProgram
from heterodyne.frontend.bound_stage import BoundStage
from heterodyne.frontend.opaque import CapturedModel, Opaque, opaque, read_count
from heterodyne.frontend.own_memory import require_own_memory
from heterodyne.frontend.skeleton import require_initialised
from heterodyne.frontend.stage_program import StageProgram
from heterodyne.frontend.trace import Captured, capture, trace
from heterodyne.model_output import loss_of

__all__ = [
    "BlockProgram",
    "BoundStage",
    "Captured",
    "CapturedModel",
    "Opaque",
    "StageProgram",
    "capture",
    "loss_of",
    "opaque",
    "read_count",
    "require_initialised",
    "require_own_memory",
    "trace",
]
