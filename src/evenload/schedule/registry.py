"""List all schedules by name; packages add theirs by entry points, programs by `register` (CONTRIBUTING.md)."""

from evenload.schedule.packflow import LIST, LIST_SPLIT, STATIC
from evenload.schedule.schedule_rule import ScheduleRule
from evenload.schedule.static_schedules import GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from evenload.types.base import Registry

SCHEDULES: Registry[ScheduleRule] = Registry(
    "schedule", ScheduleRule, "evenload.schedules", (ONE_F_ONE_B, INTERLEAVED, GPIPE, ZB_H1, STATIC, LIST, LIST_SPLIT)
)
register = SCHEDULES.register
