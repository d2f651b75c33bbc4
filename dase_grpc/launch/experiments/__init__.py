"""Matrices of runs."""
