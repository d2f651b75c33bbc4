"""Updates of other projects' TD3, from a copy of their code that whoever measures has fetched.

Nothing of theirs is in this project. Their update runs as it is written, on batches that are ready: what
sampling costs them is left out.
"""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from dase_grpc.learning.agents.batch import Batch

Update = Callable[[], object]


def file_in(folder: Path, name: str) -> Path:
    """A file anywhere in a folder, of several always the same.

    Raises:
        FileNotFoundError: there is no such file.
    """
    file = min(folder.rglob(name), default=None)
    if file is None:
        raise FileNotFoundError(f"no {name} under {folder}")
    return file


def module_of(file: Path) -> Any:
    """The module of a file, loaded anew."""
    spec = importlib.util.spec_from_file_location(f"rival_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def authors(folder: Path, batch: Batch) -> Update:
    """DASE_TD3 of github.com/baturaysaglam/DASE; half of the batch's rows may be another agent's."""
    module = module_of(file_in(folder, "DASE_TD3.py"))
    agent = module.DASE_TD3(batch.observation.shape[1], batch.action.shape[1], 1.0, 0, 0)
    columns = (batch.reward, batch.agent_id.float(), batch.bootstrap)
    ready = [
        each.contiguous()
        for each in (batch.observation, batch.action, batch.next_observation, *(c[:, None] for c in columns))
    ]
    buffer = SimpleNamespace(sample=lambda _: ready)
    return lambda: agent.update_parameters(buffer, len(batch.reward))


def cleanrl(folder: Path, batch: Batch) -> Update:
    """td3_continuous_action.py of github.com/vwxyzjn/cleanrl: its networks and its lines from the sample on.

    Its logging, each 100 steps, is left out.
    """
    file = file_in(folder, "td3_continuous_action.py")
    tree = ast.parse(file.read_text())
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "np": np}
    networks: list[ast.stmt] = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ("Actor", "QNetwork")
    ]
    exec(compile(ast.Module(networks, []), str(file), "exec"), names)
    training = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "rb.sample" in ast.unparse(node.body[0])
    )
    lines = [node for node in training.body if "writer" not in ast.unparse(node)]
    code = compile(ast.Module(lines, []), str(file), "exec")
    names |= _setting(names, batch)

    def update() -> None:
        names["global_step"] += 1
        exec(code, names)

    return update


def _setting(names: dict[str, Any], batch: Batch) -> dict[str, Any]:
    """What its training loop finds defined, with its own defaults."""
    m, n = batch.observation.shape[1], batch.action.shape[1]
    bound = np.ones(n, np.float32)
    space = SimpleNamespace(shape=(n,), low=-bound, high=bound)
    envs = SimpleNamespace(single_observation_space=SimpleNamespace(shape=(m,)), single_action_space=space)
    actors = [names["Actor"](envs) for _ in range(2)]
    critics = [names["QNetwork"](envs) for _ in range(4)]

    def ready(column: Tensor) -> Tensor:
        return column.reshape(len(batch.reward), -1).contiguous()

    data = SimpleNamespace(
        observations=ready(batch.observation),
        actions=ready(batch.action),
        next_observations=ready(batch.next_observation),
        rewards=ready(batch.reward),
        dones=ready(1 - batch.bootstrap),
    )
    twins = [p for critic in critics[:2] for p in critic.parameters()]
    return {
        "global_step": 0,
        "args": SimpleNamespace(
            batch_size=len(batch.reward),
            policy_noise=0.2,
            noise_clip=0.5,
            gamma=0.99,
            policy_frequency=2,
            tau=0.005,
        ),
        "envs": envs,
        "device": torch.device("cpu"),
        "rb": SimpleNamespace(sample=lambda _: data),
        "actor": actors[0],
        "target_actor": actors[1],
        **dict(zip(("qf1", "qf2", "qf1_target", "qf2_target"), critics, strict=True)),
        "q_optimizer": optim.Adam(twins, lr=3e-4),
        "actor_optimizer": optim.Adam(actors[0].parameters(), lr=3e-4),
    }
