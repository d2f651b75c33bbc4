"""What may import what: import-linter's contracts, and what it cannot see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from children import importing
from contracts.source import importers, modules, reached_from
from patience import PATIENCE_S
from synthetic import flat, write_run

from dase_grpc.launch.forks import IMPORTED

PROJECT = Path(__file__).resolve().parents[2]

LEARNING = {"torch", "safetensors", "gymnasium", "mujoco", "matplotlib", "tensorboard", "PIL", "scipy"}
NETWORK = {"grpc", "grpc_health", "grpc_reflection", "google"}

SERVE_ONCE = """
import asyncio
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.nodes.replay import run_replay

options = ReplayOptions.parse(
    run_id="r", listen="127.0.0.1:0", capacity="1kb", min_size=1, seed=0, metrics_port=0, insecure=False
)

async def serve():
    stop = asyncio.Event()
    await run_replay(options, stop, lambda address: stop.set())

asyncio.run(serve())
"""


NETWORKED = tuple(f"dase_grpc.{room}" for room in ("replay.client", "replay.service", "replay.wire", "nodes"))


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    here = importing(PROJECT, NO_COLOR="1", COLUMNS="200")
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=here)


def libraries_after(code: str) -> set[str]:
    """The top-level packages that are loaded once `code` has run in a fresh interpreter."""
    report = "import json, sys; print('\\n' + json.dumps([name.partition('.')[0] for name in sys.modules]))"
    answer = python(f"{code}\n{report}")
    assert answer.returncode == 0, answer.stderr
    return set(json.loads(answer.stdout.splitlines()[-1]))


def command(*arguments: str) -> str:
    """Code that runs the command line and goes on."""
    return f"from dase_grpc.cli.main import app; app({list(arguments)!r}, standalone_mode=False)"


def test_the_import_contracts_in_pyproject_hold():
    pytest.importorskip("importlinter")
    arguments = ["--config", str(PROJECT / "pyproject.toml"), "--no-cache"]
    answer = python(f"from importlinter.cli import lint_imports_command; lint_imports_command({arguments!r})")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "0 broken" in answer.stdout


@pytest.mark.parametrize(
    "start",
    [
        "dase_grpc.launch.lockstep",
        "dase_grpc.launch.evaluate",
        "dase_grpc.learning.training.build",
        "dase_grpc.replay.buffer.run",
        "dase_grpc.runs.reports.report",
        "dase_grpc.launch.console",
    ],
)
def test_what_is_synchronous_reaches_no_asyncio_and_no_network(start):
    reached = reached_from(start)
    assert start in reached
    assert not reached & importers("asyncio")
    assert not reached & importers("grpc")
    assert not {name for name in reached if name.startswith(NETWORKED)}


def test_nothing_in_the_package_imports_a_pickle():
    """No pickle ever crosses the wire or lies in a file."""
    for library in ("pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"):
        assert importers(library) == set()


def test_nothing_in_the_package_imports_its_tests_or_their_tools():
    for library in ("pytest", "hypothesis", "worlds", "tests"):
        assert importers(library) == set()


def test_only_what_estimates_imports_scipy_and_only_when_it_does():
    assert importers("scipy") == {"dase_grpc.runs.reports.estimates"}
    assert "scipy" not in libraries_after(
        "import dase_grpc.runs.reports.compare, dase_grpc.runs.reports.report"
    )


@pytest.mark.slow
def test_a_fork_server_imports_torch_and_neither_grpc_nor_what_an_environment_may_choose_the_renderer_of():
    found = libraries_after(f"import {', '.join(IMPORTED)}")
    assert "torch" in found
    assert not found & (NETWORK | {"mujoco"})


REFUSED = [
    *([command, "nowhere"] for command in ("resume", "verify", "evaluate", "serve", "report", "compare")),
    ["train", "--config", "nowhere.toml"],
    ["experiment", "nowhere.toml"],
    ["drill", "--set", "start_steps=1"],
    ["node", "--role", "learner", "--config", "nowhere.toml"],
]


def test_a_wrong_path_or_setting_is_refused_before_anything_large_is_imported():
    code = f"""
from dase_grpc.cli.main import app
from dase_grpc.errors import UsageError

for arguments in {REFUSED!r}:
    try:
        app(arguments, standalone_mode=False)
    except UsageError:
        continue
    raise SystemExit(f"{{arguments}} are not refused")
"""
    assert not libraries_after(code) & (LEARNING | NETWORK)


def test_imports_are_absolute():
    for name, tree in modules().items():
        relative = [node for node in tree.body if getattr(node, "level", 0)]
        assert not relative, name


@pytest.mark.parametrize(
    ("names", "spares"),
    [
        (("nodes.replay", "replay.service.server", "observe.top"), LEARNING),
        (("launch.console", "replay.buffer.run"), LEARNING | NETWORK),
        (("schema", "config.resolve"), NETWORK),
    ],
)
def test_what_others_stand_on_loads_nothing_large(names, spares):
    assert not libraries_after("\n".join(f"import dase_grpc.{name}" for name in names)) & spares


def test_the_replay_node_serves_without_anything_that_learns_or_simulates():
    loaded = libraries_after(SERVE_ONCE)
    assert "grpc" in loaded
    assert not loaded & (LEARNING | {"rich", "typer"})


ANSWERED = [
    *("config", "version", "--help"),
    *(f"{name} --help" for name in ("train", "experiment", "compare", "status", "top")),
]


def test_the_command_line_answers_without_loading_torch_or_grpc():
    code = f"""
import sys
from dase_grpc.cli.main import app

for answered in {ANSWERED!r}:
    app(answered.split(), standalone_mode=False)
    if loaded := {LEARNING | NETWORK!r} & {{name.partition(".")[0] for name in sys.modules}}:
        raise SystemExit(f"dase {{answered}} loads {{loaded}}")
"""
    assert "typer" in libraries_after(code)


def test_a_cluster_is_observed_without_anything_that_learns_simulates_or_draws():
    code = command("status", "--replay", "127.0.0.1:1", "--timeout", "0.1")
    loaded = libraries_after(
        f"try:\n    {code}\nexcept Exception as error:\n    assert 'answer' in str(error)"
    )
    assert {"grpc", "rich"} <= loaded
    assert not loaded & LEARNING


@pytest.mark.slow
def test_comparing_runs_loads_nothing_that_learns_and_no_network(tmp_path):
    for seed in range(3):
        write_run(tmp_path, f"run-{seed}", flat(seed), seed=seed)
    loaded = libraries_after(command("compare", str(tmp_path), "--out", str(tmp_path / "out")))
    assert {"scipy", "matplotlib"} <= loaded
    assert not loaded & (NETWORK | {"torch", "gymnasium", "mujoco", "safetensors"})


@pytest.mark.slow
def test_lockstep_loads_no_network():
    loaded = libraries_after("import dase_grpc.launch.lockstep")
    assert "torch" in loaded
    assert not loaded & {"grpc", "grpc_health", "grpc_reflection"}
