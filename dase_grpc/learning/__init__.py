"""Agents and how they learn: torch and Gymnasium, no network."""
