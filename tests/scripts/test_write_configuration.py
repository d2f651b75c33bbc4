"""docs/configuration.md is what the settings say."""

from pathlib import Path

from write_configuration import document

from dase_grpc.config.presets import BASE_PRESETS, PRESETS
from dase_grpc.config.resolve import setting_names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python scripts/write_configuration.py > docs/configuration.md"
    )


def test_every_setting_and_preset_is_described() -> None:
    page = document()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert list(rows) == [*setting_names(), *(name for name in PRESETS if name not in BASE_PRESETS)]
    assert all(not line.endswith("|  |") for line in rows.values())
    assert all(f"### `{name}`" in page for name in BASE_PRESETS)
    assert '`env.id = "Humanoid-v5"`, `agent.reward_scale = 20.0`' in rows["paper/sac/Humanoid"]


def test_constraints_are_shown_in_words() -> None:
    rows = {line.split("`")[1]: line for line in document().splitlines() if line.startswith("| `")}
    assert "| ≥ 0, < 1 |" in rows["agent.gamma"]
    assert "| list of integers | `[256, 256]` | not empty, each > 0, ≤ 65536 |" in rows["agent.hidden"]
    assert "| integer or text |" in rows["replay.capacity"]
    assert '`"jeffreys"`, `"js"`' in rows["dps.divergence"]
