"""A running replay node, or just its service, for each test."""

import pytest
from nodes.fixtures import all_is_said, replay
from nodes.learning_cases import compute_threads
from replay.wire.fixtures import service

__all__ = ["all_is_said", "replay", "service"]


@pytest.fixture(autouse=True)
def no_compute_thread_is_left():
    yield
    assert compute_threads() == []
