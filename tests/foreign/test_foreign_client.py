"""A client in another language, written from docs/protocol.md, and the service understand each other."""

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from learning.agent_cases import CONFIGS
from replay.wire.services import serving

from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.learning.training.parts import to_bytes
from dase_grpc.replay.client.policies import PolicyPublisher
from dase_grpc.schema import TransitionSchema

HERE = Path(__file__).parent
PACKAGES = HERE / "package.json"
PROTOS = HERE.parents[1] / "protos"
INSTALL_S, RUN_S = 300, 120
SCHEMA = TransitionSchema('lab:Süd "2"', 3, 2, (-2.0, -0.0), (2.0, float(np.float32(0.4))))


@pytest.fixture(scope="module")
def node_path() -> Path:
    """The packages of the client, installed once for all runs and outside the source tree."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("this test needs node and npm")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "dase-tests" / f"foreign-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's workers share the folder
            _install(folder)
    except OSError as error:
        pytest.skip(f"the client's packages cannot be installed: {error}")
    return folder / "node_modules"


def _install(folder: Path) -> None:
    done = folder / "installed"
    if done.exists():
        return
    shutil.copy(PACKAGES, folder)
    command = ["npm", "install", "--ignore-scripts", "--no-package-lock", "--no-audit", "--no-fund"]
    try:
        npm = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the client's packages cannot be installed: npm did not end within {INSTALL_S} s")
    if npm.returncode:
        said = next((line for line in npm.stderr.splitlines() if "error" in line), f"code {npm.returncode}")
        pytest.skip(f"the client's packages cannot be installed: {said}")
    done.touch()


def test_the_clients_packages_have_exact_versions():
    versions = json.loads(PACKAGES.read_text(encoding="utf-8"))["dependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + 2 * RUN_S)
async def test_a_client_in_another_language_joins_inserts_samples_publishes_subscribes_and_leaves(node_path):
    policy = make_agent(CONFIGS["ddpg"], SCHEMA, seed=3, agent_id=0, device=torch.device("cpu")).policy
    tensors = dict(policy.named_tensors())
    tensors["normaliser.mean"].copy_(torch.tensor([0.5, -1.0, 20.0]))
    observation = np.array([[0.25, 3.0, -1.5]], np.float32)
    async with serving() as service:
        ours = await service.target(0, schema=SCHEMA)
        await PolicyPublisher(ours).publish(7, to_bytes(tensors))
        saw = await client(node_path, str(service.address), observation[0].tolist())
        assert service.stored() == list(range(1, 31))
        theirs = service.run.leases.all()[1]
        assert (theirs.node_name, theirs.left_because) == ("foreign", "has seen all")
        assert service.run.policies.versions == {0: 7, 1: 2}
        assert service.run.policies.incoming_bytes == 0
    assert (saw["agent_id"], saw["fingerprint"]) == (1, SCHEMA.fingerprint)
    assert {serial for batch in saw["batches"] for serial in batch} <= set(range(1, 31))
    np.testing.assert_allclose([saw["actions"]], policy.act(observation), rtol=1e-5, atol=1e-6)


async def client(node_path: Path, address: str, observation: list[float]) -> dict:
    """What the client saw."""
    node = await asyncio.create_subprocess_exec(
        *("node", str(HERE / "client.js"), address, str(PROTOS)),
        *(json.dumps(asdict(SCHEMA)), json.dumps(observation)),
        env={**os.environ, "NODE_PATH": str(node_path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_S):
            out, complaints = await node.communicate()
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
    assert node.returncode == 0, complaints.decode()
    return json.loads(out)
