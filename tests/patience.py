"""How long tests wait for what has to come."""

PATIENCE_S = 240.0
"""Only what is dead, or waits for itself, takes as long, however busy the machine is.

pytest's own limit, in pyproject.toml, is longer, so that a wait in vain says what it was for.
"""
