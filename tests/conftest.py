"""What all tests share."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side, one on each core


def pytest_configure(config: pytest.Config) -> None:
    # Box2D's SWIG types warn while they are imported; nobody here can change that.
    config.addinivalue_line(
        "filterwarnings", "ignore:builtin type .* has no __module__ attribute:DeprecationWarning"
    )
