"""Pages say what is: their links lead somewhere, and the commands in them are commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from contracts.source import ROOT as PACKAGE
from contracts.source import sources
from typer.main import get_command

from dase_grpc.cli.main import app
from dase_grpc.cli.node import TAKES
from dase_grpc.runs.reports.compare import compare
from dase_grpc.runs.reports.comparison_tables import csv_files

ROOT = PACKAGE.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
OF_TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]
BLOCK = re.compile(r"^```[^`\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(dase [^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|[;&|(] *|\bdo )(dase [^;&|>#)\n]*)", re.MULTILINE)
DASE = get_command(app)
PYTHON_FILE = re.compile(r"(?<![\w/.{*-])[\w.-][\w./-]*\.py\b")
SAVED = {
    name
    for page in PAGES
    for name in re.findall(r"^```\w+ title=\"(\S+)\"$", page.read_text("utf-8"), re.MULTILINE)
}
"""Files that a page has its reader make."""
FOLDER = re.compile(r"(?<![\w/])(?:dase_grpc|tests|benchmarks|scripts)/[\w/]*\w(?![\w/*<{-]|\.\w)")


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `dase` of each command on a page, in blocks and within sentences."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        yield from (found.split()[1:] for found in COMMAND.findall(block.replace("\\\n", " ")))
    yield from (found.split()[1:] for found in INLINE.findall(prose(page)))


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", heading)) for heading in headings)
    return {heading.strip().lower().replace(" ", "-") for heading in plain}


def faults(words: list[str]) -> Iterator[str]:
    """What a command would be refused for: no such command, flag, or flag of that role."""
    command = DASE
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    if words and hasattr(command, "commands"):
        yield f"no command {words[0]}"
        return
    known = {name for parameter in command.params for name in parameter.opts}
    flags = [word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("--")]
    yield from (f"no flag {flag}" for flag in flags if flag not in known)
    if command.name == "node" and "--role" in words:
        role = words[words.index("--role") + 1]
        names = ["assignments" if flag == "--set" else flag[2:].replace("-", "_") for flag in flags]
        takes = {"role"}.union(*(TAKES[each] for each in role.split("|")))
        yield from (f"{name} is not for {role}" for name in names if name not in takes)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        url = urlsplit(link)
        if url.scheme:
            continue
        target = (page.parent / url.path).resolve() if url.path else page
        assert target.exists(), link
        assert not url.fragment or url.fragment in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_on_a_page_exists_with_its_flags(page):
    for words in commands(page):
        assert not list(faults(list(words))), f"dase {' '.join(words)}"


def missing_files(text: str, *folders: Path) -> list[str]:
    """The Python files that a text names and that are nowhere here: root, package, tests, these folders."""
    named = [ROOT / folder for folder in FOLDER.findall(text)]
    within = (ROOT, PACKAGE, ROOT / "tests", *folders, *named)
    return [
        name for name in PYTHON_FILE.findall(text) if not any((place / name).is_file() for place in within)
    ]


@pytest.mark.parametrize("page", OF_TODAY, ids=page_name)
def test_every_python_file_and_folder_of_code_that_a_page_names_exists(page):
    assert set(missing_files(page.read_text(encoding="utf-8"), page.parent)) <= SAVED


def test_every_python_file_and_folder_of_code_that_a_module_names_exists():
    for name, text in sources().items():
        beside = ROOT.joinpath(*name.split("."))
        assert not missing_files(text, beside, beside.parent), name


CLASS_IN_FILE = re.compile(r"\b([A-Z][a-z]\w+)`? \(((?:[a-z_]+/)+[a-z_]+\.py)\)")


def misplaced_classes(text: str) -> list[str]:
    """The classes that a text says lie in a module, as `Name (room/file.py)`, and that do not."""
    return [
        f"{name} ({path})"
        for name, path in CLASS_IN_FILE.findall(text)
        if f"class {name}" not in (PACKAGE / path).read_text(encoding="utf-8")
    ]


def test_every_class_that_a_module_says_another_holds_is_there():
    for name, text in sources().items():
        assert not misplaced_classes(text), name
    assert misplaced_classes("as `Guide` (learning/agents/policy.py)") == [
        "Guide (learning/agents/policy.py)"
    ]


RESULT = re.compile(r"(?<!out )(?<!results )(?<![\w/])docs/results/[\w./*-]+")
"""Results that a command reads; what it writes need not be there."""
NUMBER = re.compile(r"(?<=,)-?\d+(?:\.\d+)?(?:e-?\d+)?(?=[,\r\n])")
COMPARED = re.compile(r"^dase compare ([^#\n]*) --out (docs/results/\S+)", re.MULTILINE)


@pytest.mark.parametrize("page", OF_TODAY, ids=page_name)
def test_every_result_that_a_command_on_a_page_reads_is_there(page):
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert all(any(ROOT.glob(name)) for name in RESULT.findall(block)), page


@pytest.mark.parametrize(
    ("runs", "out"), [found for page in OF_TODAY for found in COMPARED.findall(page.read_text("utf-8"))]
)
def test_a_comparison_that_is_kept_is_what_its_command_writes(runs, out, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, content in csv_files(compare(runs.split())).items():
        kept = (ROOT / out / name).read_text(encoding="utf-8")
        assert NUMBER.sub("", kept) == NUMBER.sub("", content.decode()), name
        numbers = [[float(each) for each in NUMBER.findall(text)] for text in (kept, content.decode())]
        assert numbers[0] == pytest.approx(numbers[1]), name


def test_a_file_that_is_gone_and_a_folder_that_is_named_would_be_found():
    assert missing_files("see `replay/wire/statuses.py` and link.py") == [
        "replay/wire/statuses.py",
        "link.py",
    ]
    assert not missing_files("in dase_grpc/replay/client: link.py; `replay/wire/status.py`, schema.py")


def test_a_command_that_is_none_would_be_found():
    assert list(faults(["trian", "--steps", "3"])) == ["no command trian"]
    assert list(faults(["train", "--stps", "3"])) == ["no flag --stps"]
    assert list(faults(["node", "--role", "actor", "--run-dir", "x"])) == ["run_dir is not for actor"]
