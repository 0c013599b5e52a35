"""Simulation: predicted timelines, their numbers, and bounds to compare them with."""

from ppdsl.simulation.bounds import Bounds, lower_bounds
from ppdsl.simulation.costs import Costs, flop_costs, measured_costs, stage_costs, uniform_costs
from ppdsl.simulation.fitting import fitted_costs
from ppdsl.simulation.measures import Metrics, bubble_fraction, metrics
from ppdsl.simulation.simulator import period, simulate, simulate_schedule

__all__ = [
    "Bounds",
    "Costs",
    "Metrics",
    "bubble_fraction",
    "fitted_costs",
    "flop_costs",
    "lower_bounds",
    "measured_costs",
    "metrics",
    "period",
    "simulate",
    "simulate_schedule",
    "stage_costs",
    "uniform_costs",
]
