"""Finding a schedule: a list scheduler for any graph, the best of the families, an exact solver."""

from ppdsl.search.auto import Found, find_schedule
from ppdsl.search.list_scheduler import Priority, list_schedule
from ppdsl.search.memory import Memory
from ppdsl.search.solver import Solution, solve

__all__ = ["Found", "Memory", "Priority", "Solution", "find_schedule", "list_schedule", "solve"]
