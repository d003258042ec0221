"""Pure estimates: seconds and bytes of blocks, collectives, devices and steps."""

from heterodyne.cost.collective import AlphaBeta, Collectives
from heterodyne.cost.compute import Compute, compute_of
from heterodyne.cost.curve import Curve
from heterodyne.cost.memory import DeviceMemory, MemoryAssumptions, MemoryUse
from heterodyne.cost.model import CostModel
from heterodyne.cost.recipe import Recipe
from heterodyne.cost.routes import Route
from heterodyne.cost.stage import StageCosts
from heterodyne.cost.step import RankCosts, StepCosts

__all__ = [
    "AlphaBeta",
    "Collectives",
    "Compute",
    "CostModel",
    "Curve",
    "DeviceMemory",
    "MemoryAssumptions",
    "MemoryUse",
    "RankCosts",
    "Recipe",
    "Route",
    "StageCosts",
    "StepCosts",
    "compute_of",
]
