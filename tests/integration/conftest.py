"""Runs that a test starts as a person does, and that do not outlive it."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from integration.commands import Train


@pytest.fixture
def train(tmp_path) -> Iterator[Callable[..., Train]]:
    """Starts a `dase train`; what is left of it in the end is killed."""
    started = []

    def start(*arguments: object, **options) -> Train:
        started.append(Train(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        for pid in each.nodes().values():
            os.kill(pid, signal.SIGKILL)
