"""What the last replay on a data directory was started with, for the next one to say what is different."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SETTINGS: Final = "settings.json"


def note_settings(path: Path, settings: Mapping[str, float]) -> list[str]:
    """Keeps what a replay is started with; returns each difference from the last start as "NAME A, was B".

    Settings come from the command, never from here, so a file that cannot be read or written is no more
    than one that is not there.
    """
    file = path / SETTINGS
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    known = before if isinstance(before, dict) else {}
    differences = [
        f"{name} {value:g}, was {known[name]}"
        for name, value in settings.items()
        if name in known and known[name] != value
    ]
    if known != settings:
        _put(file, json.dumps(dict(settings)))
    return differences


def _put(file: Path, text: str) -> None:
    staged = file.with_name(f"{SETTINGS}.new")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(file)
    except OSError:
        staged.unlink(missing_ok=True)
