"""Site pages: a page of the documentation site for each file outside docs/ that a page links to.

A hook of MkDocs. On GitHub a page links to code as it lies there, `../examples/my_env.py`; the site holds
docs/ alone. So what is linked becomes a page, too: Markdown as it is, a notebook as its cells, other text as
code, a folder as the list of its files; and links lead to these pages.
"""

import json
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
LINK: Final = re.compile(r"(?<=\]\()[^)#\s]+")
LANGUAGES: Final = {".py": "python", ".js": "js", ".toml": "toml", ".proto": "proto", ".yml": "yaml"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages, those that only such a page links to included."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        for path in linked(waiting.pop()):
            if uri(path) not in files.src_uris:
                page = File.generated(
                    config, uri(path), abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV
                )
                files.append(page)
                waiting.append(path)
    return files


def on_page_read_source(*, page: Page, config: MkDocsConfig) -> str | None:
    """The page of a file that is no Markdown."""
    path = source(page)
    return None if path.suffix == ".md" else text(path)


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to pages, where they lead to files and folders."""
    path, folder = source(page), posixpath.dirname(page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        target = place(path, link[0])
        return posixpath.relpath(uri(target), folder) if target else link[0]

    return LINK.sub(led, markdown)


def source(page: Page) -> Path:
    """The file or folder that a page is made of."""
    return Path(page.file.abs_src_path or "")


def place(page: Path, link: str) -> Path | None:
    """The file or folder that a link on a page leads to, of a folder with a README that."""
    path = Path(os.path.normpath((page if page.is_dir() else page.parent) / link))
    if not path.exists() or not path.is_relative_to(ROOT):
        return None
    return path / "README.md" if (path / "README.md").is_file() else path


def uri(path: Path) -> str:
    """Where in the site's sources a file's page is: docs/ is its root, and everything else lies beside."""
    inside = path.is_relative_to(DOCS)
    name = path.relative_to(DOCS if inside else ROOT).as_posix()
    if path.is_dir():
        return f"{name}/index.md"
    return name if inside or path.suffix == ".md" else f"{name}.md"


def linked(page: Path) -> Iterator[Path]:
    """The files and folders that a page links to."""
    markdown = text(page) if page.is_dir() or page.suffix == ".md" else ""
    return filter(None, (place(page, link) for link in LINK.findall(markdown)))


def text(path: Path) -> str:
    """A file's page in Markdown."""
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        names = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
        return title + "\n".join(f"- [{name}]({name})" for name in names)
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return content
    if path.suffix == ".ipynb":
        return "\n\n".join(map(cell, json.loads(content)["cells"]))
    return title + fenced(content, LANGUAGES.get(path.suffix, "text"))


def cell(of: dict[str, Any]) -> str:
    """A notebook's cell, whose outputs are not kept."""
    lines = "".join(of["source"])
    return fenced(lines, "python") if of["cell_type"] == "code" else lines


def fenced(content: str, language: str) -> str:
    """A block of code."""
    return f"````{language}\n{content.rstrip()}\n````\n"
