"""docs/cli.md is what the commands say."""

from pathlib import Path

from write_cli import document

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run: python scripts/write_cli.py > docs/cli.md"


def test_every_command_and_flag_is_described_but_no_leash() -> None:
    page = document()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {"## dase train", "## dase certs issue", "## dase check-env"} <= set(page.splitlines())
    assert all(not line.endswith("|  |") for line in rows)
    assert any(line.startswith("| `--data-dir` | DIR | ") for line in rows)
    assert "leash" not in page
