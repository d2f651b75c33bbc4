"""A running replay node for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest
from nodes.running import RunningReplay, replay_node


@pytest.fixture
async def replay() -> AsyncIterator[RunningReplay]:
    async with replay_node() as running:
        yield running
