"""The Dockerfile: what hadolint says, pins that fit the dependencies, and images that run without rights."""

import importlib.metadata
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from children import ran
from deploy.deployed import PROJECT
from deploy.imaging import BASE, Builder, sandboxed
from deploy.servers import ASKED_AGAIN_S, free_ports
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from patience import PATIENCE_S

PINS = PROJECT / "deploy" / "image"
TABLES = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
EVERYTHING = TABLES["project"]["dependencies"] + TABLES["project"]["optional-dependencies"]["certs"]
REPLAY = TABLES["dependency-groups"]["replay"]
TINY = "--agents=1 --steps=300 --set agent.start_steps=100 --set eval.every=300 --set eval.episodes=1"


def pinned(name: str) -> dict[str, str]:
    lines = (PINS / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_hadolint_finds_nothing():
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    checked = ran(program, "--failure-threshold", "info", "Dockerfile", cwd=PROJECT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(("file", "wanted"), [("full.txt", EVERYTHING), ("replay.txt", REPLAY)])
def test_every_dependency_is_pinned_to_a_version_that_will_do(file, wanted):
    pins = pinned(file)
    for text in wanted:
        need = Requirement(text)
        assert need.specifier.contains(pins[need.name]), f"run scripts/write_image_pins.py: {need}"


def test_the_replay_needs_some_of_the_dependencies_at_the_very_same_versions():
    assert set(REPLAY) <= set(EVERYTHING)
    full, replay = pinned("full.txt"), pinned("replay.txt")
    assert replay.items() <= full.items()
    assert not {"torch", "gymnasium", "mujoco", "matplotlib", "scipy"} & set(replay)


@pytest.mark.slow
def test_a_replay_imports_nothing_that_its_image_is_without():
    names = "{name.partition('.')[0] for name in sys.modules.keys() - before}"
    imported = "import dase_grpc.cli.main, dase_grpc.nodes.replay"
    code = f"import sys; before = set(sys.modules); {imported}; print(*{names})"
    without = pinned("full.txt").keys() - pinned("replay.txt").keys()
    whose = importlib.metadata.packages_distributions()
    loaded = ran(sys.executable, "-c", code, check=True).stdout.split()
    found = {name: {canonicalize_name(each) for each in whose[name]} for name in loaded if name in whose}
    assert [name for name, distributions in found.items() if distributions <= without] == []


def test_images_run_as_a_number_without_a_shell_and_leave_probing_to_probes():
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG BASE={BASE}\n" in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["65532:65532"]
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE) == ['["dase"]']
    assert not re.search(r"^(HEALTHCHECK|CMD)", text, re.MULTILINE)


def test_only_what_is_copied_goes_to_the_builder():
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        source
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
        for source in sources.split()
    }
    assert all(any(source == each or source.startswith(f"{each}/") for each in sent) for source in copied)
    assert "*" in ignored


class Image:
    """A built image that is mounted, and how to run it."""

    def __init__(self, builder: Builder, name: str) -> None:
        self.config = json.loads(builder.buildah("inspect", "--type=image", name))["OCIv1"]["config"]
        self.container, self.root = builder.mounted(name)
        self.environment = dict(each.split("=", 1) for each in self.config["Env"])

    def command(self, *arguments: str) -> list[str]:
        """Starts the entry point."""
        return sandboxed(self.root, self.environment, *self.config["Entrypoint"], *arguments)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return ran(*self.command(*arguments))

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return ran(*sandboxed(self.root, self.environment, "python", "-c", code))


@pytest.fixture(scope="module", params=["replay", "full"])
def image(builder: Builder, request: pytest.FixtureRequest) -> Iterator[Image]:
    image = Image(builder, builder.build(request.param))
    yield image
    builder.buildah("rm", image.container)


@contextmanager
def serving(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def answer(url: str) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=ASKED_AGAIN_S) as answered:
            return str(answered.read().decode())
        time.sleep(0.1)
    raise AssertionError(f"{url} does not answer")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_image_runs_read_only_and_without_rights(image):
    assert image.config["User"] == "65532:65532"
    assert image.config["Labels"]["org.opencontainers.image.version"] == TABLES["project"]["version"]
    assert image.run("version").stdout.strip() == TABLES["project"]["version"]
    who = image.python("import os; print(os.getuid()); open('/written', 'w')")
    assert who.stdout.strip() == "65532"
    assert "Read-only file system" in who.stderr
    grpc = free_ports(2)
    metrics = grpc + 1
    node = ["node", "--role=replay", f"--listen=127.0.0.1:{grpc}", f"--metrics-port={metrics}"]
    with serving(image.command(*node, "--data-dir=/tmp/data", "--capacity=1000")):
        assert answer(f"http://127.0.0.1:{metrics}/readyz") == "ready\n"
        assert answer(f"http://127.0.0.1:{metrics}/healthz") == "alive\n"
    if image.python("import torch").returncode == 0:
        trained = image.run("train", *TINY.split(), "--runs=/tmp/runs")
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert "all steps done" in trained.stdout
