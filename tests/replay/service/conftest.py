"""A running replay node, or just its service, for each test."""

from nodes.fixtures import replay
from replay.wire.fixtures import service

__all__ = ["replay", "service"]
