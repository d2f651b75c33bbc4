"""A running replay node for each test that asks for one."""

import logging
from collections.abc import AsyncIterator

import pytest
from nodes.running import RunningReplay, replay_node


@pytest.fixture(autouse=True)
def all_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dase")


@pytest.fixture
async def replay() -> AsyncIterator[RunningReplay]:
    async with replay_node() as running:
        yield running
