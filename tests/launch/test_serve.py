"""`dase serve`: what it serves acts as the run's policy does, whichever way it is held; and as a process."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from children import importing, ran
from contracts.sentences import refuses
from inference.policies import ABOUT, HeldPolicy
from inference.servers import called, client_of, policy_server
from launch.resuming import config, train
from patience import PATIENCE_S
from replay.wire.services import LOOPBACK

from dase_grpc import api
from dase_grpc.errors import (
    AddressError,
    ConfigError,
    CredentialsError,
    DivergedError,
    MalformedError,
    RunDirectoryError,
    UsageError,
)
from dase_grpc.inference.client import PolicyClient
from dase_grpc.launch.export import export_policy
from dase_grpc.launch.serve import ServedPolicy, _served, serve_here, served_policy
from dase_grpc.nodes.policy_options import PolicyOptions
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.runs.directory import RunDirectory

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    settings = config("worlds:MatrixAction", agent__normalise_observations=True, train__steps=60)
    return train(tmp_path_factory.mktemp("serve"), settings)


@pytest.fixture(scope="module", params=["1", "best", "ensemble", ".onnx", ".pt"])
def held(request, run, tmp_path_factory):
    """What is served, which agent of it, and which policy of the run that is."""
    if request.param.isalnum():
        return run.path, request.param, int(request.param) if request.param == "1" else request.param
    file = tmp_path_factory.mktemp("file") / f"policy{request.param}"
    return export_policy(run.path, file, agent=1), None, 1


@pytest.mark.slow
async def test_what_is_served_acts_as_the_policy(held, run):
    target, agent, choice = held
    policy = api.load(run.path).policy(choice)
    observations = np.random.default_rng(3).normal(scale=2.0, size=(20, policy._size)).astype(np.float32)
    async with policy_server(served_policy(target, agent)) as server:
        with client_of(server) as client:
            found = await called(client.act, observations)
            one = await called(client.act, observations[7])
            about = client.description
    expected = policy.act(observations)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found == pytest.approx(expected, rel=0, abs=1e-6)
    assert one == pytest.approx(expected[7], rel=0, abs=1e-6)
    assert (about.environment, about.step, about.algorithm) == ("worlds:MatrixAction", 60, "td3")
    assert about.action_high == pytest.approx(policy.action_space.high.ravel())
    expected_name = (
        "the ensemble"
        if choice == "ensemble"
        else r"agent \d \(the best\)"
        if choice == "best"
        else "agent 1"
    )
    assert re.fullmatch(expected_name, about.agent)
    assert about.commit == run.versions.get("git", "")
    assert (about.score is None) == (choice == "ensemble")


@pytest.mark.parametrize(
    ("world", "shape", "dtype"),
    [
        ("worlds:PictureObservation", (2, 2, 3), "float32"),
        ("worlds:DictObservation", (8,), "float32"),
        ("worlds:IntegerAction", (2,), "int32"),
    ],
)
def test_observations_have_the_environments_shape_or_are_flat_where_it_is_none(tmp_path, world, shape, dtype):
    run = train(tmp_path, config(world, train__steps=30, train__agents=1))
    for served in (
        served_policy(run.path, "0"),
        served_policy(export_policy(run.path, tmp_path / "p.onnx", agent=0)),
    ):
        assert served.description.observation_shape == shape
        assert served.description.action_dtype == np.dtype(dtype)


def test_what_cannot_be_served_is_refused(run, tmp_path):
    with refuses(RunDirectoryError, "no checkpoint of agent 7"):
        served_policy(run.path, "7")
    with refuses(UsageError, "--agent 'worst' is neither"):
        served_policy(run.path, "worst")
    file = export_policy(run.path, tmp_path / "p.onnx", agent=0)
    with refuses(ConfigError, "p.onnx holds one policy; leave --agent 1 out"):
        served_policy(file, "1")
    elsewhere = tmp_path / "by\udcff.onnx"
    elsewhere.write_bytes(file.read_bytes())
    for use in (lambda: served_policy(elsewhere), lambda: export_policy(run.path, elsewhere, agent=0)):
        with refuses(RunDirectoryError, "is not UTF-8, so no policy can be kept there"):
            use()
    for name in ("none.onnx", "none.pt"):
        with refuses(UsageError, f"there is no file {tmp_path / name}"):
            served_policy(tmp_path / name)
        (tmp_path / name).write_bytes(b"no model")
        with refuses(UsageError, f"{name} cannot be read as", "write it with `dase export`"):
            served_policy(tmp_path / name)


async def test_what_a_server_cannot_listen_with_is_refused_before_its_policy_is_loaded(tmp_path):
    nothing = tmp_path / "none.onnx"
    async with policy_server(ServedPolicy(HeldPolicy(), ABOUT)) as server:
        taken = PolicyOptions(listen=server.address)
        with refuses(AddressError, "in use", "--listen"):
            serve_here(nothing, None, taken, stdin_is_leash=False)
        metrics = PolicyOptions(listen=LOOPBACK, metrics_port=server.metrics_port)
        with refuses(AddressError, "cannot serve metrics on", "another metrics port"):
            serve_here(nothing, None, metrics, stdin_is_leash=False)
    with refuses(CredentialsError, "cannot read"):
        serve_here(nothing, None, PolicyOptions(listen=LOOPBACK, tls=tmp_path), stdin_is_leash=False)
    with refuses(UsageError, f"there is no file {nothing}"):
        serve_here(nothing, None, PolicyOptions(listen=LOOPBACK), stdin_is_leash=False)


@pytest.mark.parametrize("milliseconds", [-1.0, 1e6, float("nan")])
def test_a_delay_that_is_none_is_refused(milliseconds):
    with refuses(ConfigError, "--max-delay-ms", "give milliseconds, 0 to 10000"):
        PolicyOptions.parse(max_delay_s=milliseconds)


def test_a_file_of_someone_elses_does_not_say_what_it_observes(tmp_path):
    import torch

    torch.jit.trace(torch.nn.Linear(3, 1), torch.zeros(1, 3)).save(str(tmp_path / "other.pt"))
    with refuses(UsageError, "other.pt does not say what it observes"):
        served_policy(tmp_path / "other.pt")


@pytest.mark.parametrize(
    "changed",
    [
        {"observation_size": "4"},
        {"observation_size": "0"},
        {"observation_size": '"x"'},
        {"observation_shape": "[2, 5]"},
        {"action_low": "null"},
        {"step": '"x"'},
        {"environment": None},
    ],
)
def test_a_file_whose_metadata_is_another_ones_is_refused(run, tmp_path, changed):
    import onnx

    model = onnx.load(export_policy(run.path, tmp_path / "p.onnx", agent=0))
    told = {each.key: each.value for each in model.metadata_props} | changed
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {key: value for key, value in told.items() if value is not None})
    onnx.save(model, tmp_path / "p.onnx")
    with refuses(UsageError, "p.onnx cannot be read as the policy that its metadata describes"):
        served_policy(tmp_path / "p.onnx")


def test_a_torchscript_file_whose_metadata_is_damaged_is_refused(tmp_path):
    import torch

    traced = torch.jit.trace(torch.nn.Linear(3, 1), torch.zeros(1, 3))
    torch.jit.save(traced, str(tmp_path / "p.pt"), _extra_files={"metadata.json": "{"})
    with refuses(UsageError, "p.pt cannot be read as TorchScript"):
        served_policy(tmp_path / "p.pt")


def test_a_policy_whose_actions_are_not_finite_is_not_served():
    with refuses(DivergedError, "not finite"):
        _served(lambda rows: np.full((len(rows), 1), np.nan), {"observation_size": 2})


def test_an_action_that_is_not_finite_is_refused_before_it_becomes_a_whole_number(tmp_path, monkeypatch):
    run = train(tmp_path, config("worlds:IntegerAction", train__steps=30, train__agents=1))
    policy, huge = api.load(run.path).policy(0), np.float32([[0, 0], [3e38, 3e38]])

    def overflowing(self, rows):
        return np.where(rows[:, :1] > 1e38, np.nan, 0.0)

    monkeypatch.setattr(type(policy._policy), "act", overflowing)
    served = served_policy(run.path, "0")
    with refuses(MalformedError, "the policy's action for observation 1 is not finite"):
        served.act(huge)
    assert served.act(huge[:1]).dtype == np.int32
    with refuses(DivergedError, "the policy's action is not finite"):
        policy.act(huge)


@pytest.mark.slow
def test_a_file_in_onnx_is_served_and_a_policy_asked_without_torch_or_gymnasium(run, tmp_path):
    export_policy(run.path, tmp_path / "p.onnx", agent=0)
    code = """
import sys
from pathlib import Path
import dase_grpc
from dase_grpc.launch.serve import served_policy
dase_grpc.PolicyClient("127.0.0.1:1").close()
served_policy(Path("p.onnx"))
sys.exit(" ".join({"torch", "gymnasium", "mujoco"} & set(sys.modules)) or 0)
"""
    done = ran(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_it_is_told_to_stop(run, number):
    command = [sys.executable, "-m", "dase_grpc", "serve", str(run.path), "--agent=1", "--listen=127.0.0.1:0"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=importing(TESTS))
    try:
        line = process.stdout.readline()
        assert line.startswith(READY_PREFIX), process.stderr.read()
        with PolicyClient(line.removeprefix(READY_PREFIX).strip()) as client:
            assert client.act(np.zeros(client.description.observation_shape)).shape == (2, 3)
        process.send_signal(number)
        _, log = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, log
    assert "agent 1 in worlds:MatrixAction after 60 steps" in log
    assert "stopped; 1 observation answered" in log
    assert "Traceback" not in log
