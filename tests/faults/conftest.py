"""The storm script as a module: it also reads a replay's files without the service's code."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/storm.py"


@pytest.fixture
def storm(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("storm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "storm", module)
    spec.loader.exec_module(module)
    return module
