"""Random models, schedules, placements, delays and faults on real processes, for as long as one likes."""
