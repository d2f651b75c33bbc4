"""docs/metrics.md is what the nodes export."""

from pathlib import Path

from write_metrics import document, families, registries

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python scripts/write_metrics.py > docs/metrics.md"
    )


def test_every_metric_of_each_role_is_on_the_page_once() -> None:
    names = {family.name for made in registries().values() for family in families(made)}
    rows = [line.split("`")[1] for line in document().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(names)
