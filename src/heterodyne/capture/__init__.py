"""From an nn.Module to a ModelGraph."""

from heterodyne.capture.block_program import BlockProgram
from heterodyne.capture.output import loss_of
from heterodyne.capture.trace import Captured, capture, trace

__all__ = ["BlockProgram", "Captured", "capture", "loss_of", "trace"]
