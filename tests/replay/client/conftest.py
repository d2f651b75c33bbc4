"""A running replay node, or just its service, for each test."""

import threading

import pytest
from nodes.fixtures import all_is_said, replay
from replay.wire.fixtures import service

__all__ = ["all_is_said", "replay", "service"]


@pytest.fixture(autouse=True)
def no_session_leaves_a_thread_behind():
    yield
    assert [each.name for each in threading.enumerate() if each.name == "dase session"] == []
