"""What all tests share."""

import gc
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from dase_grpc.__main__ import GARBAGE_AFTER

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: tests run side by side, one on each core
# Before grpc, which some tests import ahead of dase_grpc, whose __init__.py says why.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


gc.set_threshold(GARBAGE_AFTER)  # as a process of `dase` does, whose modules these import, too
hypothesis.settings.register_profile("dase", deadline=None)  # how long an example takes is the machine's
hypothesis.settings.load_profile("dase")


LIBRARIES = {
    "MPLBACKEND",
    "MUJOCO_GL",
    "PYGAME_HIDE_SUPPORT_PROMPT",
    "PYOPENGL_PLATFORM",
    "TORCHINDUCTOR_CACHE_DIR",
}
"""Variables that libraries, or we for them, set for good."""


def pytest_configure(config: pytest.Config) -> None:
    # Box2D's SWIG types warn while they are imported; nobody here can change that.
    config.addinivalue_line(
        "filterwarnings", "ignore:builtin type .* has no __module__ attribute:DeprecationWarning"
    )


def pytest_xdist_auto_num_workers() -> int:
    """Of `-n logical`: one more than there are processors, for tests also wait."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes minutes, unless DASE_LONG is set."""
    if os.environ.get("DASE_LONG"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_collection_finish() -> None:
    """Spares all that has been imported and collected, which stays, every further look for garbage."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Leaves the folder that the tests are started from: what lies there is nothing to them."""
    started_in, elsewhere = Path.cwd(), tmp_path_factory.mktemp("elsewhere")
    os.chdir(elsewhere)
    yield elsewhere
    os.chdir(started_in)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(_elsewhere: Path) -> Iterator[None]:
    """Each test works in a folder where nothing lies; one that nobody wrote to is the next one's, too."""
    folder = _elsewhere / "empty"
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    yield
    os.chdir(_elsewhere)
    if any(folder.iterdir()):
        folder.rename(_elsewhere / f"written-{time.monotonic_ns()}")


@pytest.fixture(autouse=True)
def _leaves_the_variables(_in_an_empty_folder: None) -> Iterator[None]:
    """No test leaves a variable to those that the same process runs after it."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in {*before.items()} ^ {*os.environ.items()}}
    left = changed - LIBRARIES - {"PYTEST_CURRENT_TEST"}
    assert not left, f"the test has left variables otherwise: {', '.join(sorted(left))}"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this test needs the right to mount a file system")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
