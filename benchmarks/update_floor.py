"""Measures updates against the machine's limit: the operations they need over the rate of matrix products.

python benchmarks/update_floor.py [--seconds 80] [--results FILE.csv] [--authors FOLDER] [--cleanrl FOLDER]
python benchmarks/update_floor.py --quick
python benchmarks/update_floor.py --show FILE.csv

One CPU thread, 17 observations, 6 actions, batch 256, the paper's settings. All take turns in short rounds
of one process, timed by processor time, so that a busy machine slows all alike; each round has a floor of its
own, from the products it measured. FOLDER holds a copy of github.com/baturaysaglam/DASE or
github.com/vwxyzjn/cleanrl; without one that comparison is skipped.

autograd: the reference twin. passes: what runs. left out: half of the rows weigh 0. bfloat16: the same with
agent.products = bfloat16, where the CPU has such products. In the steps the rows come as from the replay and
half of them are another agent's: loaded, weighed by DPS, learned from.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from update_flops import forward, update_flops
from update_rivals import authors, cleanrl
from update_tables import Timed, here, read_timed, tables, write_timed

from dase_grpc.config.algorithms import ALGORITHMS, DpsConfig
from dase_grpc.config.presets import preset
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import DaseError, DeviceError
from dase_grpc.learning.agents.actor_critic import ActorCritic
from dase_grpc.learning.agents.batch import Batch, Staging, that_count
from dase_grpc.learning.agents.ddpg import DDPG
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.sac import SAC
from dase_grpc.learning.agents.td3 import TD3
from dase_grpc.learning.similarity.weigher import SimilarityWeigher, weighed
from dase_grpc.schema import Array, TransitionSchema

KINDS: Mapping[str, type[TD3] | type[SAC] | type[DDPG]] = {"td3": TD3, "sac": SAC, "ddpg": DDPG}
CPU = torch.device("cpu")
M, N, ROWS = 17, 6, 256
SCHEMA = TransitionSchema("Benchmark-v0", M, N, (-1.0,) * N, (1.0,) * N)
UPDATES = 8
SQUARE = 256


@dataclass(frozen=True)
class Subject:
    """What is timed, and how many floating-point operations it needs, if that is counted."""

    name: str
    call: Callable[[], object]
    flops: float | None = None
    per_round: int = UPDATES
    prepare: Callable[[], None] = lambda: None


def rows(*, far: bool) -> Array:
    """A batch whose second half is agent 1's: actions anywhere, or `far` from any untrained policy's."""
    drawn = np.random.default_rng(0).normal(size=(ROWS, SCHEMA.width)).astype(np.float32)
    drawn[:, SCHEMA.columns["action"]] = np.random.default_rng(1).uniform(-1, 1, (ROWS, N))
    drawn[:, SCHEMA.columns["bootstrap"]] = 1
    if far:
        drawn[ROWS // 2 :, SCHEMA.columns["action"]] = 1
    SCHEMA.agent_ids(drawn)[:] = np.arange(ROWS) >= ROWS // 2
    return drawn


def make(algorithm: str, *, autograd: bool = False, products: str = "float32") -> ActorCritic:
    """An agent with the paper's settings, but for its products."""
    config = resolve(preset(f"paper/{algorithm}"), {"agent": {"products": products}}).agent
    pick_device(None, [config])
    return KINDS[algorithm](config, SCHEMA, seed=0, agent_id=0, device=CPU, autograd=autograd)


def updates() -> list[Subject]:
    """The update alone, of each algorithm."""
    batch = Batch.from_rows(SCHEMA, torch.from_numpy(rows(far=False)))
    every, half = torch.ones(ROWS), (torch.arange(ROWS) < ROWS // 2).float()
    found = []
    for algorithm in ALGORITHMS:
        flops = partial(update_flops, resolve(preset(f"paper/{algorithm}")).agent, SCHEMA)
        twin, agent, leaving = make(algorithm, autograd=True), make(algorithm), make(algorithm)
        found += [
            Subject(f"{algorithm} autograd", partial(twin.update, batch, every), flops(ROWS)),
            Subject(f"{algorithm} passes", partial(agent.update, batch, every), flops(ROWS)),
            Subject(f"{algorithm} left out", partial(leaving.update, batch, half), flops(ROWS // 2)),
        ]
    return found


def rounded_updates() -> list[Subject]:
    """The updates whose large products are of bfloat16 numbers."""
    batch = Batch.from_rows(SCHEMA, torch.from_numpy(rows(far=False)))
    every, half = torch.ones(ROWS), (torch.arange(ROWS) < ROWS // 2).float()
    found = []
    for algorithm in ALGORITHMS:
        try:
            agent, leaving = (make(algorithm, products="bfloat16") for _ in range(2))
        except DeviceError as error:
            print(f"bfloat16: skipped, {error}", file=sys.stderr)
            return []
        found += [
            Subject(f"{algorithm} bfloat16", partial(agent.update, batch, every)),
            Subject(f"{algorithm} bfloat16, left out", partial(leaving.update, batch, half)),
        ]
    return found


def step(*, far: bool) -> Subject:
    """What a learner of two agents does with a batch: load, weigh, update."""
    agent, staging = make("td3"), Staging(SCHEMA, ROWS, CPU)
    weigher = SimilarityWeigher(DpsConfig(), own_id=0, agents=2)
    given, untrained = rows(far=far), agent.state_dict()

    def weigh() -> tuple[Batch, Tensor, Tensor | None]:
        batch = staging.load(given)
        weighing, actions = weighed(agent, weigher, batch)
        return batch, weighing.weight, actions

    def run() -> object:
        batch, weight, actions = weigh()
        return agent.update(batch, weight, actions=actions)

    def prepare() -> None:
        agent.load_state_dict(untrained)  # so that the rows stay as far or as near as they were made
        if (that_count(weigh()[1]) is None) == far:
            raise RuntimeError("the rows of the other agent do not weigh what they are to weigh")

    name = "td3 step, external vanish" if far else "td3 step"
    return Subject(name, run, prepare=prepare)


def acting() -> list[Subject]:
    """One action of a single observation, as an environment step needs it."""
    agent, one = make("td3"), np.ones((1, M), np.float32)

    def by_torch() -> object:
        with torch.inference_mode():
            return agent.policy.actions(torch.tensor(one)).numpy()

    return [
        Subject("act", partial(agent.act, one), per_round=200),
        Subject("act by torch", by_torch, per_round=200),
    ]


def products() -> list[Subject]:
    """The products that nearly all of an update is, by torch and by NumPy."""
    a, b, out = (torch.randn(SQUARE, SQUARE) for _ in range(3))
    bias, flops = torch.randn(SQUARE), forward([(SQUARE, SQUARE)], SQUARE)
    x, y, z = a.numpy(), b.numpy(), out.numpy()
    with_bias = partial(torch.addmm, bias, a, b, out=out)
    return [
        Subject("product", with_bias, flops, per_round=20),
        Subject("product by NumPy", lambda: np.matmul(x, y, out=z), flops, per_round=20),
    ]


def rivals(given: argparse.Namespace) -> list[Subject]:
    """The other projects' updates that there is a copy of."""
    found = []
    for name, folder, load in (("authors", given.authors, authors), ("cleanrl", given.cleanrl, cleanrl)):
        if folder is None:
            print(f"{name}: skipped, for --{name} FOLDER was not given", file=sys.stderr)
            continue
        batch = Batch.from_rows(SCHEMA, torch.from_numpy(rows(far=False)))
        found.append(Subject(f"{name} td3", load(folder, batch)))
    return found


def measure(subjects: list[Subject], seconds: float) -> dict[str, list[float]]:
    """Microseconds of processor time of each, round by round."""
    times: dict[str, list[float]] = {subject.name: [] for subject in subjects}
    end = time.process_time() + seconds
    while time.process_time() < end:
        for subject in subjects:
            subject.prepare()
            subject.call()
            started = time.process_time_ns()
            for _ in range(subject.per_round):
                subject.call()
            times[subject.name].append((time.process_time_ns() - started) / subject.per_round / 1e3)
    return times


def against_floor(subject: Subject, times: Mapping[str, list[float]], *, best: bool) -> float | None:
    """Time over floor: of the best rounds, or the median of the rounds' own ratios."""
    if subject.flops is None:
        return None
    share = subject.flops / forward([(SQUARE, SQUARE)], SQUARE)
    taken, product = times[subject.name], times["product"]
    if best:
        return min(taken) / min(product) / share
    return statistics.median(t / p for t, p in zip(taken, product, strict=True)) / share


def in_float32(name: str) -> str:
    """The subject that does in float32 what the one of that name does with bfloat16 products."""
    algorithm = name.split(maxsplit=1)[0]
    return f"{algorithm} left out" if name.endswith("left out") else f"{algorithm} passes"


def times_as_fast(theirs: list[float] | None, ours: list[float]) -> tuple[float | None, float | None]:
    """The median of the rounds' ratios, and the ratio of the best rounds; None without anything beside."""
    if not theirs:
        return None, None
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    return statistics.median(ratios), min(theirs) / min(ours)


def figures(subjects: list[Subject], times: Mapping[str, list[float]], load: float) -> list[Timed]:
    """What there is to say of each subject."""
    found = []
    for subject in subjects:
        taken = times[subject.name]
        exact = times[in_float32(subject.name)] if "bfloat16" in subject.name else None
        authors, authors_best = times_as_fast(times.get("authors td3"), taken)
        cleanrl, cleanrl_best = times_as_fast(times.get("cleanrl td3"), taken)
        float32, float32_best = times_as_fast(exact, taken)
        found.append(
            Timed(
                machine=here(),
                load=load,
                what=subject.name,
                rounds=len(taken),
                median_us=statistics.median(taken),
                best_us=min(taken),
                mflop=None if subject.flops is None else subject.flops / 1e6,
                floor=against_floor(subject, times, best=False),
                floor_best=against_floor(subject, times, best=True),
                authors=authors,
                authors_best=authors_best,
                cleanrl=cleanrl,
                cleanrl_best=cleanrl_best,
                float32=float32,
                float32_best=float32_best,
            )
        )
    return found


def on_one_thread() -> None:
    """Begins this program anew where NumPy has started threads, whose idle turns count as processor time."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if any(os.environ.get(name) != value for name, value in one.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **one})
    torch.set_num_threads(1)


def main() -> None:
    """Measures, or reads what was measured, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80, help="of processor time")
    parser.add_argument("--quick", action="store_true", help="a round or two, to show that it works")
    parser.add_argument("--authors", type=Path, metavar="FOLDER")
    parser.add_argument("--cleanrl", type=Path, metavar="FOLDER")
    parser.add_argument("--results", type=Path, metavar="FILE.csv", help="one line for each subject")
    parser.add_argument("--show", type=Path, metavar="FILE.csv", help="print the tables of earlier results")
    given = parser.parse_args()
    try:
        if given.show is not None:
            print(tables(read_timed(given.show)))
            return
        on_one_thread()
        subjects = [
            *products(),
            *updates(),
            *rounded_updates(),
            step(far=False),
            step(far=True),
            *rivals(given),
            *acting(),
        ]
        load = os.getloadavg()[0]
        found = figures(subjects, measure(subjects, 1.0 if given.quick else given.seconds), load)
        if given.results is not None:
            write_timed(given.results, found)
        print(tables(found))
    except (DaseError, FileNotFoundError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
