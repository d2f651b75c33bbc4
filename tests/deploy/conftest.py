"""The real Prometheus and its promtool, unpacked from Debian's package where they are not installed."""

import fcntl
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from deploy.deployed import PROJECT

CACHE = PROJECT / ".cache" / "prometheus"

Promtool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def prometheus_folder() -> Path:
    """A folder with `prometheus` and `promtool`; skips where they cannot be had."""
    installed = shutil.which("promtool")
    if installed and shutil.which("prometheus"):
        return Path(installed).parent
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [str(PROJECT / "scripts" / "get_prometheus.sh"), str(CACHE)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if made.returncode:
        pytest.skip(f"no Prometheus: {made.stderr.strip()[-200:]}")
    return CACHE / "usr" / "bin"


@pytest.fixture
def promtool(prometheus_folder: Path) -> Promtool:
    """Runs promtool."""

    def run(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(prometheus_folder / "promtool"), *map(str, arguments)]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=20, check=False, cwd=PROJECT
        )

    return run
