"""Pipeline schedules as data: who computes which micro-batch when, as lists that can be read, checked, played and drawn.

Each named schedule is one file with one pure function from places, stages a place and micro-batches to the orders of the places.
"""

from collections.abc import Mapping
from types import MappingProxyType

from heterodyne.plan.schedules.asynchronous import ASYNCHRONOUS
from heterodyne.plan.schedules.dual_pipe_v import DUAL_PIPE_V
from heterodyne.plan.schedules.gpipe import GPIPE
from heterodyne.plan.schedules.interleaved import INTERLEAVED_1F1B
from heterodyne.plan.schedules.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from heterodyne.plan.schedules.one_f_one_b import ONE_F_ONE_B
from heterodyne.plan.schedules.schedule import Orders, Schedule
from heterodyne.plan.schedules.shifted_critical_path import SHIFTED_CRITICAL_PATH
from heterodyne.plan.schedules.zb_h1 import ZB_H1
from heterodyne.plan.schedules.zb_h2 import ZB_H2
from heterodyne.plan.schedules.zbv import ZBV

__all__ = ["SCHEDULES", "Orders", "Schedule"]

SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            GPIPE,
            ONE_F_ONE_B,
            INTERLEAVED_1F1B,
            ZB_H1,
            ZB_H2,
            INTERLEAVED_ZERO_BUBBLE,
            ZBV,
            DUAL_PIPE_V,
            SHIFTED_CRITICAL_PATH,
            ASYNCHRONOUS,
        )
    }
)
"""The named schedules, in the order in which they are best explained."""
