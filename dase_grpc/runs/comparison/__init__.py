"""Runs compared over their seeds: `compare` reads and computes, the other modules show."""

from dase_grpc.runs.comparison.estimates import Estimate, Improvement, Interval
from dase_grpc.runs.comparison.results import Cell, Comparison, EnvironmentResults, compare

__all__ = [
    "Cell",
    "Comparison",
    "EnvironmentResults",
    "Estimate",
    "Improvement",
    "Interval",
    "compare",
]
