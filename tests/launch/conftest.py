"""Clusters of fake nodes, of which nobody is left in the end."""

from collections.abc import Callable, Iterator

import pytest
from launch.fake_cluster import FakeCluster


@pytest.fixture
def fakes(tmp_path) -> Iterator[Callable[..., FakeCluster]]:
    made = []

    def make(behaviours: dict[str, str], **settings) -> FakeCluster:
        made.append(FakeCluster(tmp_path, behaviours, **settings))
        return made[-1]

    yield make
    for each in made:
        assert each.left == []
