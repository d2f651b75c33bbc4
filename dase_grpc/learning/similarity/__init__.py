"""Deterministic policy similarity (DPS)."""
