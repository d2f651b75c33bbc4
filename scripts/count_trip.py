"""The files that one transition and one sampled batch pass: `python scripts/count_trip.py [ENVIRONMENT]`.

Two learners train on a replay, over gRPC on the loopback, in this process. Once updates have begun, every
call of a function of the package is noted that happens within a part of the trip (PARTS), so what counts
is what ran: not what is imported, what opens a stream, or what else the nodes do meanwhile.
"""

import asyncio
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import dase_grpc
from dase_grpc.config.resolve import resolve
from dase_grpc.nodes.learner import run_learner
from dase_grpc.nodes.options import LearnerOptions
from dase_grpc.nodes.replay import run_replay
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.replay.wire.addresses import Address, ReplayPlace

ROOT: Final = Path(dase_grpc.__file__).parent
GENERATED: Final = "replay/wire/v1/"
PARTS: Final = {
    "an environment step": ("learning/training/collection.py", "step"),
    "rows to the replay": ("replay/client/link.py", "_insert"),
    "rows into the ring": ("replay/service/insert.py", "serve"),
    "a batch out of the ring": ("replay/service/sample.py", "serve"),
    "the batch to the learner": ("replay/client/sample.py", "_fetch"),
    "an update": ("learning/training/updates.py", "update"),
}
"""Where each part of the trip begins: a file and a function."""

OF_A_BATCH: Final = tuple(PARTS)[3:]
MADE: Final = ("learning/training/updates.py", "_seen")
"""What an update does once it is made: counts, and looks."""

ASIDE: Final = {
    MADE,
    ("learning/agents/snapshots.py", "behaviour"),
    ("learning/envs/explorer.py", "_choose"),
    ("learning/envs/explorer.py", "_reset"),
}
"""What lies within those parts and not on the trip: before `env.step`, and after the gradient."""

SETTINGS: Final = {
    "train": {"agents": 2, "steps": 200, "seed": 0, "threads": 1},
    "agent": {"hidden": [16, 16], "batch_size": 32, "start_steps": 100},
    "replay": {"capacity": 1_000, "min_size": 100, "prefetch": 1},
    "eval": {"every": 1_000, "episodes": 1},
}


class Trip:
    """The files of the package whose functions run, by the part of the trip that they run in.

    `note` is a profile function (sys.setprofile), of every thread.
    """

    def __init__(self) -> None:
        self.files: dict[str, set[str]] = {part: set() for part in PARTS}
        self._begins = {place: part for part, place in PARTS.items()}
        self._names: dict[CodeType, tuple[str, str] | None] = {}
        self._updating = False

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Notes a call, from the first update on."""
        place = self._place(frame.f_code) if event == "call" else None
        if place is None:
            return
        self._updating = self._updating or place == MADE
        if not self._updating:
            return
        for within in self._around(frame):
            if within in ASIDE:
                return
            if within in self._begins:
                self.files[self._begins[within]].add(place[0])
                return

    def count(self, *parts: str) -> int:
        """How many files there are in these parts together."""
        return len(set[str]().union(*(self.files[part] for part in parts)))

    def _around(self, frame: FrameType | None) -> Iterator[tuple[str, str]]:
        """The places of a call and of its callers, outwards."""
        while frame is not None:
            if (place := self._place(frame.f_code)) is not None:
                yield place
            frame = frame.f_back

    def _place(self, code: CodeType) -> tuple[str, str] | None:
        """A function's file within the package and its name; None of what is not written in it."""
        if code not in self._names:
            path = Path(code.co_filename)
            inside = path.is_relative_to(ROOT) and code.co_name != "<module>"
            name = path.relative_to(ROOT).as_posix() if inside else GENERATED
            self._names[code] = None if name.startswith(GENERATED) else (name, code.co_name)
        return self._names[code]


async def train(env: str, folder: Path) -> None:
    """Two short learners on a replay, to the end."""
    config = resolve(SETTINGS, {"env": {"id": env}})
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    options = ReplayOptions(run_id="trip", listen=Address("127.0.0.1", 0), capacity=1_000, min_size=100)
    replay = asyncio.ensure_future(run_replay(options, stop, listening.set_result))
    place = ReplayPlace.at(await listening)
    agents = [LearnerOptions(replay=place, config=config, agent_id=each, run_dir=folder) for each in (0, 1)]
    await asyncio.gather(*(run_learner(agent, asyncio.Event()) for agent in agents))
    stop.set()
    await replay


def counted(env: str) -> Trip:
    """The trip in a run of its own.

    Raises:
        LookupError: a part of the trip was not passed: PARTS names what is not there any more.
    """
    trip = Trip()
    threading.setprofile(trip.note)
    sys.setprofile(trip.note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(train(env, Path(folder)))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if missing := [part for part, files in trip.files.items() if not files]:
        raise LookupError(f"the trip had no {', no '.join(missing)}: PARTS names functions that are gone")
    return trip


def main() -> None:
    """Prints the files of each part, and both numbers."""
    logging.disable()
    trip = counted(*(sys.argv[1:] or ["InvertedPendulum-v5"]))
    for part, files in trip.files.items():
        print(f"{part}: {' '.join(sorted(files))}")
    print(f"one transition, from env.step to the gradient: {trip.count(*PARTS)} files")
    print(f"one batch, from the ring to the gradient: {trip.count(*OF_A_BATCH)} files")


if __name__ == "__main__":
    main()
