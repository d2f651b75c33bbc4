"""A running replay node, or just its service, for each test."""

from collections.abc import AsyncIterator

import pytest
from nodes.running import RunningReplay, replay_node
from wire.services import Service, serving


@pytest.fixture
async def replay() -> AsyncIterator[RunningReplay]:
    async with replay_node() as running:
        yield running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running
