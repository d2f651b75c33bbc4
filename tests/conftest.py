"""What all tests share."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Box2D's SWIG types warn while they are imported; nobody here can change that.
    config.addinivalue_line(
        "filterwarnings", "ignore:builtin type .* has no __module__ attribute:DeprecationWarning"
    )
