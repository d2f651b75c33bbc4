"""A running service for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest
from replay.wire.services import Service, serving


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving() as running:
        yield running
