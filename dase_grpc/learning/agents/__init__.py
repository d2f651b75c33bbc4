"""Algorithms, networks and their updates."""
