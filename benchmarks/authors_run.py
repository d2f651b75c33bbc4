"""The single TD3 agent of the paper's authors, run for as long as run_time.py asks, which starts it.

python benchmarks/authors_run.py FOLDER [--env HalfCheetah-v5] [--warmup 1000] [--updates 500] [--seed 0]

FOLDER holds a copy of github.com/baturaysaglam/DASE, which is no part of this project. Its agent and its
buffer run as they are written; the loop around them is written here, in the order of its main.py and for
Gymnasium: random steps, then a step with noise and an update each; nothing is evaluated, printed or saved.
Prints one line of JSON: seconds, processor seconds, seconds without a core, and updates.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from update_rivals import file_in, module_of

BATCH: Final = 256
NOISE: Final = 0.1


def without_core_s() -> float:
    """How long this thread has been ready to run and had no core, so far."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def train(agent: Any, buffer: Any, env: Any, *, warmup: int, updates: int, seed: int) -> None:
    """Their loop: `warmup` random steps, then `updates` steps with an update each."""
    limit, size = float(env.action_space.high[0]), env.action_space.shape[0]
    rng = np.random.default_rng(seed)
    env.action_space.seed(seed)
    state, _ = env.reset(seed=seed)
    for step in range(warmup + updates):
        if step < warmup:
            action = env.action_space.sample()
        else:
            noise = rng.normal(0, limit * NOISE, size=size)
            action = (agent.select_action(np.array(state)) + noise).clip(-limit, limit)
        following, reward, terminated, truncated, _ = env.step(action)
        buffer.add(state, action, following, reward, float(terminated))
        state = following
        if step >= warmup:
            agent.update_parameters(buffer, BATCH)
        if terminated or truncated:
            state, _ = env.reset()


def main() -> None:
    """Runs it and prints what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--env", default="HalfCheetah-v5")
    parser.add_argument("--warmup", type=int, default=1_000)
    parser.add_argument("--updates", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    np.random.seed(given.seed)  # noqa: NPY002 - what their buffer draws from
    env = gymnasium.make(given.env)
    m, n = env.observation_space.shape[0], env.action_space.shape[0]  # type: ignore[index]
    limit = float(env.action_space.high[0])  # type: ignore[attr-defined]
    theirs = file_in(given.folder, "TD3.py")
    agent = module_of(theirs).TD3(
        m, n, limit, policy_noise=0.2 * limit, noise_clip=0.5 * limit, policy_freq=2
    )
    buffer = module_of(theirs.with_name("utils.py")).ExperienceReplayBuffer(m, n)  # SAC has one of its own
    began, waited, used = time.perf_counter(), without_core_s(), time.process_time()
    train(agent, buffer, env, warmup=given.warmup, updates=given.updates, seed=given.seed)
    print(
        json.dumps(
            {
                "run_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - used,
                "core_wait_s": without_core_s() - waited,
                "updates": given.updates,
            }
        )
    )


if __name__ == "__main__":
    main()
