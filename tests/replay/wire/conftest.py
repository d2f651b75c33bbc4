"""A running service for each test."""

from replay.wire.fixtures import service

__all__ = ["service"]
