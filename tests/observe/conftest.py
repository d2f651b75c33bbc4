"""A running service for each test that asks for one."""

from replay.wire.fixtures import service

__all__ = ["service"]
