"""The tutorial, page by page: its files are saved, its commands and its Python run, all for fewer steps."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from children import ran
from nodes.processes import NodeProcess, process, replay_process

PAGES = sorted((Path(__file__).parents[2] / "docs" / "tutorial").glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: title=\"(\S+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = re.compile(r"(?<=steps|.size|every)( = |=| )([\d_]+)")
USUAL = 2
"""The pages before this one are followed each time, all with `make long`."""
INSTALLS = "python3 -m venv"
ADDRESS = "127.0.0.1:50051"

pytestmark = pytest.mark.slow


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """The language, the file's name if it has one, and the text of each block of code, made short."""
    page_text = page.read_text(encoding="utf-8").replace("seeds = 3", "seeds = 1")
    for language, name, text in BLOCK.findall(page_text):
        yield language, name, STEPS.sub(lambda found: f"{found[1]}{int(found[2]) // 40}", text)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where a reader works, with `dase` on the path."""
    program = tmp_path / "bin" / "dase"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dase_grpc "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] if number >= USUAL else [])
        for number, page in enumerate(PAGES)
    ],
    ids=[page.stem for page in PAGES],
)
def test_a_page_can_be_followed(page, folder):
    for earlier in PAGES[: PAGES.index(page) + 1]:
        for _, name, text in blocks(earlier):
            if name:
                (folder / name).write_text(text, encoding="utf-8")
    scope: dict[str, object] = {}
    address, learners = ADDRESS, list[NodeProcess]()
    with ExitStack() as nodes:
        for language, name, text in blocks(page):
            if language == "python" and not name:
                exec(text, scope)
            if language != "console" or INSTALLS in text:
                continue
            _, _, *arguments = shlex.split(text.replace(ADDRESS, address))
            if text.startswith("dase node --role replay"):
                arguments[arguments.index(ADDRESS)] = "127.0.0.1:0"
                _, address = nodes.enter_context(replay_process(*arguments))
            elif text.startswith("dase node"):
                learners.append(nodes.enter_context(process(*arguments)))
            else:
                if text.startswith("dase report"):
                    assert [learner.exit_code() for learner in learners] == [0, 0]
                done = ran("bash", "-ec", text.replace(ADDRESS, address))
                assert done.returncode == 0, text + done.stdout + done.stderr
