"""The documentation site: each page is in its menu, each link leads somewhere, all it loads is its own."""

import re
import sys
from pathlib import Path

import pytest
import site_pages
from children import importing, ran

import dase_grpc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"


def built(config: Path, site: Path, *, cwd: Path = ROOT):
    command = (sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site)
    return ran(*command, cwd=cwd, env=importing(NO_MKDOCS_2_WARNING="1"))


def test_every_page_is_in_the_menu():
    menu = set(re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", CONFIG.read_text(encoding="utf-8"), re.MULTILINE))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert pages - menu == set(), "add them to `nav` in mkdocs.yml, under what they are"
    outside = {page.removesuffix(".md") if not (ROOT / page).exists() else page for page in menu - pages}
    assert [page for page in outside if not (ROOT / page).exists()] == []


def test_what_lies_outside_docs_is_a_page_of_its_own_kind():
    assert site_pages.uri(DOCS / "dps.md") == "dps.md"
    assert site_pages.uri(ROOT / "examples" / "my_env.py") == "examples/my_env.py.md"
    assert site_pages.uri(ROOT / "deploy" / "systemd") == "deploy/systemd/index.md"
    assert site_pages.place(DOCS / "hosts.md", "../deploy/slurm") == ROOT / "deploy" / "slurm" / "README.md"
    assert site_pages.place(DOCS / "hosts.md", "../../elsewhere.md") is None
    assert "````python\n%matplotlib inline\nimport sys\n" in site_pages.text(
        ROOT / "examples" / "first_run.ipynb"
    )
    assert "- [dase-replay.service](dase-replay.service)" in site_pages.text(ROOT / "deploy" / "systemd")


@pytest.mark.slow
def test_the_site_is_built_with_every_public_name_and_loads_nothing_from_elsewhere(tmp_path):
    done = built(CONFIG, tmp_path)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in dase_grpc.__all__ if f'id="dase_grpc.{name}"' not in api] == []
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")
    pages = [*tmp_path.rglob("*.html")]
    assert [found for page in pages for found in loads.findall(page.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "missed"),
    [
        ("[a](gone.md) [b](#nowhere) [c](../gone.py)", ["gone.md", "#nowhere", "../gone.py", "forgotten.md"]),
        ("::: dase_grpc.nothing", ["dase_grpc.nothing"]),
    ],
)
def test_what_is_missing_fails_the_build(tmp_path, text, missed):
    docs, config = tmp_path / "docs", tmp_path / "mkdocs.yml"
    docs.mkdir()
    (docs / "index.md").write_text(f"# Here\n\n{text}\n")
    (docs / "forgotten.md").write_text("# In no menu\n")
    config.write_text(f"INHERIT: {CONFIG}\nhooks: []\nextra_css: []\nnav: [index.md]\n")
    done = built(config, tmp_path / "site", cwd=tmp_path)
    assert done.returncode != 0
    assert [name for name in missed if name not in done.stderr] == []
