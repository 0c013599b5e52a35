"""Schedules: for each rank its computations in order."""

from ppdsl.schedule.action import Action, ActionKind, action_of, parse_action
from ppdsl.schedule.csv_text import from_rows, parse_csv, to_csv
from ppdsl.schedule.flow import Flow, carries_gradient, flow_of
from ppdsl.schedule.registry import Family, build_schedule, families, named_family, schedule_names
from ppdsl.schedule.table import Schedule

__all__ = [
    "Action",
    "ActionKind",
    "Family",
    "Flow",
    "Schedule",
    "action_of",
    "build_schedule",
    "carries_gradient",
    "families",
    "flow_of",
    "from_rows",
    "named_family",
    "parse_action",
    "parse_csv",
    "schedule_names",
    "to_csv",
]
