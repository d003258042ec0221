"""Plans in the words of other frameworks, for those that are even: the same on every device, as these frameworks know it."""

from heterodyne.plan.export.even_plan import EvenPlan, ModelShape, even_plan_of_groups
from heterodyne.plan.export.from_plan import even_plan
from heterodyne.plan.export.megatron import megatron_arguments, megatron_layout
from heterodyne.plan.export.pytorch import pytorch_takes, schedule_csv
from heterodyne.plan.export.torchtitan import torchtitan_toml

__all__ = [
    "EvenPlan",
    "ModelShape",
    "even_plan",
    "even_plan_of_groups",
    "megatron_arguments",
    "megatron_layout",
    "pytorch_takes",
    "schedule_csv",
    "torchtitan_toml",
]
