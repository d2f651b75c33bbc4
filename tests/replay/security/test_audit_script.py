"""scripts/audit.py: what it makes of the tool's answer."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "audit.py"
SOUND = {"name": "sound", "version": "1.0", "vulns": []}
BROKEN = {"name": "broken", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "unknown", "skip_reason": "Dependency not found on PyPI and could not be audited: unknown"}
EDITABLE = {"name": "ours", "skip_reason": "distribution marked as editable"}


@pytest.mark.parametrize(
    ("packages", "code", "says"),
    [
        ([SOUND, EDITABLE], 0, "1 packages looked up, 0 with"),
        ([SOUND, UNKNOWN], 0, "not audited: 1 packages"),
        ([SOUND, BROKEN, UNKNOWN], 1, "broken 1.0: CVE-1, fixed in 1.1"),
        ([UNKNOWN, EDITABLE], 3, "0 packages looked up"),
    ],
)
def test_nothing_known_is_told_from_nothing_looked_up(capsys, packages, code, says):
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.report(packages) == code
    assert says in capsys.readouterr().out
