"""The generated code in the repository is what the .proto files give."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

PROJECT = Path(__file__).resolve().parents[2]
GENERATED = ("dase_grpc/replay/wire/v1", "dase_grpc/inference/v1")


def test_regenerating_the_wire_changes_not_a_byte(tmp_path):
    pytest.importorskip("grpc_tools")
    pytest.importorskip("mypy_protobuf")
    script = [sys.executable, str(PROJECT / "scripts/generate_protos.py"), "--out", str(tmp_path)]
    # An empty PATH: the plugins lie beside the interpreter, whether its environment is activated or not.
    answer = subprocess.run(
        script, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env={"PATH": ""}
    )
    assert answer.returncode == 0, answer.stderr
    for folder in GENERATED:
        fresh = {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}
        kept = {path.name: path.read_bytes() for path in (PROJECT / folder).iterdir() if path.is_file()}
        assert kept.pop("__init__.py") == b""
        assert sorted(fresh) == sorted(kept)
        assert [name for name in fresh if fresh[name] != kept[name]] == []
