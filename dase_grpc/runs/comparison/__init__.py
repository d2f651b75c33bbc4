"""Runs compared over their seeds: `compare` reads and computes, the other modules show."""

from dase_grpc.runs.reports.compare import Cell, Comparison, EnvironmentResults, compare
from dase_grpc.runs.reports.estimates import Estimate, Improvement, Interval

__all__ = [
    "Cell",
    "Comparison",
    "EnvironmentResults",
    "Estimate",
    "Improvement",
    "Interval",
    "compare",
]
