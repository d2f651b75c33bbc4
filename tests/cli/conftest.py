"""A command line that runs in the test's own process."""

import sys

import pytest

from dase_grpc.cli.main import main


@pytest.fixture
def dase(monkeypatch, capsys, tmp_path):
    """Runs a command line in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dase", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
