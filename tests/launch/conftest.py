"""Clusters of fake nodes, of which nobody is left in the end; reports without their pictures."""

from collections.abc import Callable, Iterator

import pytest
from launch.fake_cluster import FakeCluster

from dase_grpc.runs.reports.figures import Sheet


@pytest.fixture
def fakes(tmp_path) -> Iterator[Callable[..., FakeCluster]]:
    made = []

    def make(behaviours: dict[str, str], **settings) -> FakeCluster:
        made.append(FakeCluster(tmp_path, behaviours, **settings))
        return made[-1]

    yield make
    for each in made:
        assert each.left == []


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch) -> None:
    """A report has all but what its pictures show: to draw them takes longer than these runs do.

    They are drawn where reports are tested, and by every run of the command line's and integration's tests.
    """
    monkeypatch.setattr(Sheet, "svg", lambda sheet: "<svg></svg>")
