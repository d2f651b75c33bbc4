"""A running service for each test."""

from wire.fixtures import service

__all__ = ["service"]
