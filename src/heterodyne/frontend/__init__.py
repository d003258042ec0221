"""From an nn.Module to a ModelGraph."""

from heterodyne.frontend.block_program import BlockProgram
from heterodyne.frontend.output import loss_of
from heterodyne.frontend.trace import Captured, capture, trace

__all__ = ["BlockProgram", "Captured", "capture", "loss_of", "trace"]
