"""docs/metrics.md is what the nodes export."""

from pathlib import Path

from dase_grpc.metrics_reference import document, families, registries

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "run: python -m dase_grpc.metrics_reference > docs/metrics.md"
    )


def test_every_metric_of_each_role_is_on_the_page_once() -> None:
    names = {family.name for made in registries().values() for family in families(made)}
    rows = [line.split("`")[1] for line in document().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(names)
