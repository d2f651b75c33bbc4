"""Environments: found, made, tried out, explored, evaluated. No torch."""
