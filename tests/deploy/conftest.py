"""The real Prometheus, promtool and helm, fetched where they are not installed, and a Slurm."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from children import ran
from deploy.charts import CONFIG, VALUES, Helm, Rendered
from deploy.deployed import PROJECT
from deploy.imaging import Builder, missing_tools
from local_slurm import LocalSlurm, NoSlurm, local_slurm

CACHE = PROJECT / ".cache" / "prometheus"

Promtool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def prometheus_folder() -> Path:
    """A folder with `prometheus` and `promtool`; skips where they cannot be had."""
    return monitoring_folder("prometheus", "promtool")


@pytest.fixture(scope="session")
def alertmanager_folder() -> Path:
    """A folder with `prometheus-alertmanager` and `amtool`; skips where they cannot be had."""
    folder = monitoring_folder("prometheus-alertmanager", "amtool")
    tried = ran(folder / "prometheus-alertmanager", "--version")
    if tried.returncode:  # unpacked and not installed, it needs a mount namespace
        pytest.skip(f"no Alertmanager: {tried.stderr.strip()[-200:]}")
    return folder


@pytest.fixture
def promtool(prometheus_folder: Path) -> Promtool:
    """Runs promtool."""
    return partial(ran, prometheus_folder / "promtool", cwd=PROJECT)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """helm; skips where it cannot be had."""
    installed = shutil.which("helm")
    if installed:
        return Helm(Path(installed))
    folder = PROJECT / ".cache" / "kubernetes"
    made = fetched("get_helm.sh", folder)
    if made.returncode:
        pytest.skip(f"no helm: {made.stderr.strip()[-200:]}")
    return Helm(folder / "helm")


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, Rendered]:
    """The manifests for every set of values."""
    return {
        name: helm.rendered(*values, config=CONFIG if name == "everything" else "")
        for name, values in VALUES.items()
    }


@pytest.fixture(scope="session")
def builder() -> Builder:
    """Builds images, in a storage that is kept; skips where it cannot be had."""
    if missing := missing_tools():
        pytest.skip(f"{', '.join(missing)} not installed; run scripts/get_image_tools.sh")
    return Builder(PROJECT / ".cache" / "images")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[LocalSlurm]:
    """A Slurm of this machine, of two nodes that are one; skips where it cannot be had."""
    try:
        with local_slurm(tmp_path / "slurm", nodes=2, cpus=2) as running:
            yield running
    except NoSlurm as reason:
        pytest.skip(str(reason))


def monitoring_folder(*programs: str) -> Path:
    """Where these programs are, fetched if they are not installed; skips where they cannot be had."""
    installed = [shutil.which(program) for program in programs]
    if installed[0] and all(installed):
        return Path(installed[0]).parent
    made = fetched("get_prometheus.sh", CACHE)
    if made.returncode:
        pytest.skip(f"no {programs[0]}: {made.stderr.strip()[-200:]}")
    return CACHE / "usr" / "bin"


def fetched(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a script that puts tools into a folder, where they may be already."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        return ran(PROJECT / "scripts" / script, folder, env={**os.environ, "PYTHON": sys.executable})
