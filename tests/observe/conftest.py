"""A running service for each test that asks for one."""

from wire.fixtures import service

__all__ = ["service"]
