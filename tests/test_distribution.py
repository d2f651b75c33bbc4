"""The wheel and the sdist: what is in them, and that they run where the repository is not."""

import os
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from children import ran
from contracts.source import PROJECT, VERSION
from contracts.source import ROOT as PACKAGE

pytestmark = pytest.mark.slow

SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
OF_ITS_OWN = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
"""An environment that says nothing of where modules are."""

TINY = ("--steps=120", "--set=agent.start_steps=60", "--set=agent.hidden=[8]", "--set=eval.episodes=1")

FETCHED_S = 1_200
"""Until then a gigabyte of libraries is here, or will not come."""

Dase = Callable[..., CompletedProcess[str]]


@dataclass
class Distribution:
    """What was built of a copy of the sources, in which a test lies, too."""

    sdist: Path
    wheel: Path
    from_tree: Path
    package: set[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    shutil.copytree(PACKAGE, tree / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    package = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    for name in SOURCES:
        shutil.copy(PROJECT / name, tree)
    (tree / "tests").mkdir()
    shutil.copy(__file__, tree / "tests")
    build = (sys.executable, "-m", "build", "--no-isolation", tree, "--outdir")
    environ = {**OF_ITS_OWN, "SOURCE_DATE_EPOCH": "1800000000"}
    ran(*build, folder / "dist", env=environ, check=True)
    ran(*build, folder / "again", "--wheel", env=environ, check=True)
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return Distribution(sdist, wheel, folder / "again" / wheel.name, package)


def test_the_wheel_holds_the_package_whole_and_nothing_else(built):
    assert built.wheel.name == f"dase_grpc-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    about = f"dase_grpc-{VERSION}.dist-info"
    assert {name for name in names if not name.startswith(about)} == built.package
    assert {f"{about}/licenses/LICENSE", f"{about}/entry_points.txt"} <= names
    assert {"dase_grpc/py.typed", "dase_grpc/__init__.pyi", "dase_grpc/runs/published/LICENSE"} <= names


def test_the_sdist_holds_what_the_wheel_is_made_of_and_no_test(built):
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert built.package | set(SOURCES) <= names
    assert not [name for name in names if name.startswith("tests")]


def test_a_wheel_of_the_sdist_is_that_of_the_tree_to_the_byte(built):
    with zipfile.ZipFile(built.wheel) as wheel, zipfile.ZipFile(built.from_tree) as other:
        assert {each: wheel.read(each) for each in wheel.namelist()} == {
            each: other.read(each) for each in other.namelist()
        }
    assert built.wheel.read_bytes() == built.from_tree.read_bytes()


def installed(wheel: Path, folder: Path, *options: str) -> Dase:
    """Puts the wheel into a virtual environment of its own; runs `dase` of that in an empty folder."""
    place, empty = folder / "venv", folder / "empty"
    venv.create(place, symlinks=True)
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--no-compile")
    ran(*pip, *options, wheel, env=OF_ITS_OWN, check=True, timeout=FETCHED_S)
    dase = (place / "bin" / "python", "-I", place / "bin" / "dase")
    return lambda *words: ran(*dase, *words, env=OF_ITS_OWN, cwd=empty)


def assert_works(dase: Dase, folder: Path, *mode: str) -> None:
    told = dase("--version")
    assert (told.returncode, told.stdout, told.stderr) == (0, f"{VERSION}\n", "")
    trained = dase("train", *mode, *TINY, "--name=run")
    assert trained.returncode == 0, trained.stderr
    run = folder / "empty" / "runs" / "run"
    assert f'dase = "{VERSION}"' in (run / "run.toml").read_text()
    (run / "report.html").unlink()
    told = dase("report", "runs/run")
    assert (told.returncode, told.stdout) == (0, "runs/run/report.html\n"), told.stderr
    assert (run / "report.html").is_file()


def test_the_wheel_runs_beside_the_libraries_that_are_here(built, tmp_path):
    dase = installed(built.wheel, tmp_path, "--no-deps", "--no-index")
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "here.pth").write_text("\n".join(here))  # behind what lies in `site` itself
    assert_works(dase, tmp_path, "--lockstep")


@pytest.mark.long
@pytest.mark.timeout(2 * FETCHED_S)
def test_the_wheel_runs_in_an_environment_of_its_own_with_what_it_asks_for(built, tmp_path):
    assert_works(installed(built.wheel, tmp_path), tmp_path)
