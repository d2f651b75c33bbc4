"""Benchmarks are scripts beside each other; a test imports one as Python does when it is run."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script of the folder by its name, and what it imports there, for the time of the test."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture
def called(monkeypatch, capsys):
    """Calls a script's main with arguments, as on a machine without a GPU; returns what it prints."""
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
        try:
            module.main()
        except SystemExit as ended:  # with a verdict; what cannot be is a sentence
            if isinstance(ended.code, str):
                raise
        return capsys.readouterr().out

    return call
