"""What a release says of itself: the version and the date once, and the same wherever they are repeated."""

import re

import pytest
import yaml
from contracts.source import PROJECT, VERSION

REPEATED = {
    "CITATION.cff": r"^version: (.*)$",
    "Dockerfile": r"^ARG VERSION=(.*)$",
    "deploy/helm/dase/Chart.yaml": r'^(?:version|appVersion): "?([^"\n]*)"?$',
    "docs/kubernetes.md": r"(?:/dase:|image\.tag=)(\d+(?:\.\d+)*)",
    "docs/experiments.md": r"/dase:(\d+(?:\.\d+)*)",
}
CITATION = yaml.safe_load((PROJECT / "CITATION.cff").read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", REPEATED)
def test_the_version_is_that_of_pyproject_wherever_it_is_repeated(file):
    found = re.findall(REPEATED[file], (PROJECT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert set(found) == {VERSION}, f"{file} says {found}, pyproject.toml {VERSION}"


def test_the_newest_release_in_the_changelog_is_this_version_at_the_date_of_the_citation():
    text = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, newest, *_ = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "Unreleased"
    assert newest == f"{VERSION} - {CITATION['date-released']}"


def test_the_citation_has_what_its_format_asks_for():
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["type"] == "software"
    assert CITATION["message"]
    for work in (CITATION, *CITATION["references"]):
        assert work["title"]
        assert work["type"]
        assert all(
            "name" in each or {"family-names", "given-names"} <= each.keys() for each in work["authors"]
        )
    (paper,) = CITATION["references"]
    assert paper["url"].removeprefix("https://arxiv.org/abs/") == paper["doi"].removeprefix("10.48550/arXiv.")
