"""`dase export`: a file that acts as the policy does, and is not kept where it does not."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import importing, ran
from contracts.sentences import assert_one_sentence, refuses
from launch.resuming import config, train
from typer.testing import CliRunner

from dase_grpc import api
from dase_grpc.cli.main import app
from dase_grpc.errors import ConfigError, DaseError, RunDirectoryError, UsageError
from dase_grpc.launch import export
from dase_grpc.launch.export import export_policy
from dase_grpc.learning.agents.exported import Recipe, write_onnx
from dase_grpc.learning.agents.model_files import EXTRA, ModelFile, read_onnx, read_torchscript
from dase_grpc.runs.directory import RunDirectory

ONNX = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
ENVIRONMENTS = ("worlds:PointGoal", "worlds:IntegerAction", "worlds:MatrixAction")


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def run(request, tmp_path_factory) -> RunDirectory:
    normalised = request.param == "worlds:MatrixAction"
    settings = config(request.param, agent__normalise_observations=normalised, train__steps=60)
    return train(tmp_path_factory.mktemp("export"), settings)


def acting(path: Path) -> Any:
    if path.suffix == ".pt":
        module = torch.jit.load(str(path))
        return lambda rows: module(torch.from_numpy(rows)).numpy()
    session = ONNX.InferenceSession(str(path))
    return lambda rows: session.run(None, {"observation": rows})[0]


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt"])
def test_the_file_acts_as_the_policy_in_the_environments_units(run, tmp_path, ending):
    path = export_policy(run.path, tmp_path / f"policy{ending}", agent=1)
    policy = api.load(run.path).policy(1)
    size = policy._size
    rows = np.random.default_rng(5).normal(scale=3.0, size=(64, size)).astype(np.float32)
    expected, found = policy.act(list(rows)), acting(path)(rows)
    assert found.dtype == expected.dtype == policy.action_space.dtype
    assert found.shape == expected.shape == (64, *policy.action_space.shape)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert sorted(each.name for each in tmp_path.iterdir()) == [path.name]


def test_the_metadata_say_whose_policy_it_is(run, tmp_path):
    import onnx

    export_policy(run.path, tmp_path / "p.onnx")
    export_policy(run.path, tmp_path / "p.pt")
    extra = {EXTRA: ""}
    torch.jit.load(str(tmp_path / "p.pt"), _extra_files=extra)
    of_torch = json.loads(extra[EXTRA])
    of_onnx = {
        each.key: json.loads(each.value) for each in onnx.load(str(tmp_path / "p.onnx")).metadata_props
    }
    assert of_torch == of_onnx
    assert of_onnx["environment"] == run.config.env.id
    assert (of_onnx["step"], of_onnx["chosen"], of_onnx["algorithm"]) == (60, "best", "td3")
    assert len(of_onnx["action_low"]) >= 1
    assert of_onnx["score"] == pytest.approx(api.load(run.path).evaluations[of_onnx["agent"]].return_mean[-1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> RunDirectory:
    return train(tmp_path_factory.mktemp("pair"), config(train__steps=60))


def test_a_file_that_acts_otherwise_is_not_kept(pair, tmp_path, monkeypatch):
    def off(path: Path) -> ModelFile:
        file = read_torchscript(path)
        return replace(file, act=lambda rows: file.act(rows) + 1e-3)

    monkeypatch.setitem(export.READERS, ".pt", off)
    with refuses(DaseError, "the file's actions differ by", "it was not kept"):
        export_policy(pair.path, tmp_path / "p.pt")
    assert list(tmp_path.iterdir()) == []


def test_what_float32_rounds_is_no_difference_and_more_is(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [(64, 11), (64, 64), (1, 64)]  # and weights as large as those of a trained policy
    layers = [(rng.normal(0, 0.4, size).astype(np.float32), np.zeros(size[0], np.float32)) for size in sizes]
    recipe = Recipe(tuple(layers), None, -np.ones(1), np.ones(1), (1,), np.dtype(np.float32))

    def exactly(rows: Any, error: float = 0.0) -> Any:
        hidden = rows.astype(np.float64)
        for weight, _ in layers[:-1]:
            hidden = np.maximum(hidden @ weight.T, 0)
        return (np.tanh(hidden @ layers[-1][0].T) + error).astype(np.float32)

    write_onnx(recipe, tmp_path / "p.onnx", {})
    file = read_onnx(tmp_path / "p.onnx").act
    rows = rng.normal(0, 30, (1_000, 11)).astype(np.float32)
    assert np.abs(exactly(rows) - file(rows)).max() > 2 * export.TOLERANCE
    export._require_alike(exactly, file, recipe)
    with refuses(DaseError, "the file's actions differ by", "it was not kept"):
        export._require_alike(lambda rows: exactly(rows, 1e-5), file, recipe)


def test_what_no_file_can_be_made_of_is_refused(pair, tmp_path, monkeypatch):
    with refuses(ConfigError, "ends in none of .onnx, .pt"):
        export_policy(pair.path, tmp_path / "p.pkl")
    with refuses(ConfigError, "the ensemble acts by K policies and critics"):
        export_policy(pair.path, tmp_path / "p.pt", agent="ensemble")
    with refuses(RunDirectoryError, "no checkpoint of agent 7"):
        export_policy(pair.path, tmp_path / "p.pt", agent=7)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refuses(ConfigError, 'ONNX needs the library onnx; run: pip install "dase-grpc[export]"'):
        export_policy(pair.path, tmp_path / "p.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_one_sentence(pair, tmp_path):
    done = CliRunner().invoke(app, ["export", str(pair.path), str(tmp_path / "none" / "p.pt"), "--agent=0"])
    assert isinstance(done.exception, DaseError)
    assert_one_sentence(done.exception, "cannot write", "there is no folder")


def test_what_no_file_can_take_the_place_of_is_refused_before_any_policy_is_looked_for(tmp_path):
    (tmp_path / "folder.pt").mkdir()
    with refuses(UsageError, "folder.pt: it is a folder"):
        export_policy(tmp_path / "run", tmp_path / "folder.pt")
    with refuses(UsageError, "p.pt: there is no folder", "none"):
        export_policy(tmp_path / "run", tmp_path / "none" / "p.pt")


def test_the_command_names_what_it_wrote(pair, tmp_path):
    done = CliRunner().invoke(app, ["export", str(pair.path), str(tmp_path / "p.pt"), "--agent=0"])
    assert done.exit_code == 0
    said = re.escape(f"{tmp_path / 'p.pt'}: agent 0 in {pair.config.env.id} after ")
    assert re.fullmatch(rf"{said}[\d,]+ steps, evaluated at -?[\d,.]+\n", done.output)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".onnx", ".pt"])
def test_a_disk_that_is_full_is_said_and_nothing_is_left(tmp_path, ending):
    trained = train(tmp_path / "runs", config("worlds:PointGoal", train__steps=40, train__agents=1))
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / f"policy{ending}"
    code = """
import resource
from dase_grpc.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
main()
"""
    tests = importing(Path(__file__).parents[1])
    done = ran(sys.executable, "-c", code, "export", trained.path, file, "--agent=0", env=tests)
    assert done.returncode == 2, done.stderr
    assert f"error: cannot write {file}" in done.stderr
    assert list(file.parent.iterdir()) == []
