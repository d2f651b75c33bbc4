"""Runs on disk, for each test that asks for them."""

from replay.buffer.runs_on_disk import runs

__all__ = ["runs"]
