"""The plan: the one artefact between thinking and doing, and the program that it lowers to."""

from heterodyne.plan.buckets import gradient_buckets
from heterodyne.plan.micro_batches import MicroBatches
from heterodyne.plan.plan import Axis, Group, Layout, Pipeline, Plan, Prediction, Region, Stage
from heterodyne.plan.program import Action, Program

__all__ = [
    "Action",
    "Axis",
    "Group",
    "Layout",
    "MicroBatches",
    "Pipeline",
    "Plan",
    "Prediction",
    "Program",
    "Region",
    "Stage",
    "gradient_buckets",
]
