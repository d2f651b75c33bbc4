"""The replay against Reverb and against a bare TCP socket: the same work, turn by turn, in one run.

python benchmarks/against_reverb.py [--turns 5] [--seconds 2] [--results FILE.csv]
python benchmarks/against_reverb.py --quick
python benchmarks/against_reverb.py --show FILE.csv

For a narrow (17 observation and 6 action components) and a wide (348 and 17) task: batches of 256 a second
into NumPy arrays, transitions stored one by one a second, and bytes of resident memory for each of 100,000
transitions. Every server and every client is a process of its own on this machine; who is not at work waits.

Reverb 0.14 lives in a virtual environment of its own: `scripts/get_reverb.sh`. Where that is not there it is
left out, and the output says so. It is used in named columns, like for like, and with transitions that its
user packs into one vector; each figure is that of the best of the ways known to be fast.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from contestants import Ours, Reverb, Tcp
from measuring import (
    TASKS,
    Entry,
    Figure,
    answer,
    conditions,
    machine,
    markdown,
    mean_ratio,
    median,
    ratios,
    resident_bytes,
    take_turns,
    values,
    write_figures,
)
from readers_in_place import Readers

from dase_grpc.process.ends import keep_freed_memory
from dase_grpc.replay.buffer.priorities import Prioritisation
from dase_grpc.replay.buffer.sampling import Sampling

ROOT: Final = Path(__file__).parents[1]
REVERB_PYTHON: Final = ROOT / ".cache/reverb/bin/python"
FILL: Final = 100_000

SAMPLE, INSERT, LEARN = "batches/s", "inserts/s", "prioritised batches/s"
MEMORY, ALL_MEMORY = "bytes per transition", "bytes per transition, messages included"
WAYS = "batches/s, by how they are drawn"
SHARE, PRIORITIES = "DASE, own share 0.5", "DASE, prioritised, errors returned"
BY_PRIORITY: Final = Sampling(prioritisation=Prioritisation(alpha=0.6, epsilon=1e-6, uniform=0.0))
IN_PLACE, IN_PLACE_TWO = "DASE, in place", "DASE, in place, 2 readers"
OURS, OURS_NAMED, TCP, ROW = "DASE", "DASE, from named columns", "bare TCP", "the row itself"
FORMS: Final = {"named": "Reverb, named columns", "packed": "Reverb, packed by hand"}
INSERT_METHODS: Final = ("structured", "writer")
SAMPLE_METHODS: Final = ("one stream", "two streams")
ASKED: Final = {
    (SAMPLE, "narrow"): {"named": 12.0, "packed": 5.0, TCP: 0.25},
    (SAMPLE, "wide"): {"named": 5.0, "packed": 3.0, TCP: 0.75},
    (INSERT, "narrow"): {"named": 12.0, "packed": 4.0},
    (INSERT, "wide"): {"named": 12.0, "packed": 4.0},
    (LEARN, "narrow"): {"named": 5.0, "packed": 5.0},
    (LEARN, "wide"): {"named": 3.0, "packed": 3.0},
}
"""How many times as fast as each of them the replay is meant to be."""

ASKED_IN_PLACE: Final = {
    "narrow": {(IN_PLACE, TCP): 0.9},
    "wide": {(IN_PLACE, TCP): 3.0, (IN_PLACE_TWO, IN_PLACE): 1.7},
}
"""The same of learners on the replay's own machine."""


def measure(
    runner: asyncio.Runner, task: str, python: Path | None, *, turns: int, seconds: float, fill: int
) -> Iterator[Figure]:
    """Everything about one task."""
    m, n = TASKS[task]
    with ExitStack() as started:
        ours = started.enter_context(Ours(runner, m, n, capacity=fill))
        reverbs = reverbs_for(started, python, m, n, "uniform")
        row_bytes = ours.schema.row_bytes
        for what in (MEMORY, ALL_MEMORY):
            yield Figure(machine(), os.getloadavg()[0], task, what, ROW, 0, row_bytes)
        filling: dict[str, Ours | Reverb] = {OURS: ours, **{FORMS[form]: it for form, it in reverbs.items()}}
        for who, filled in filling.items():
            yield from memory_of(filled, who, task, fill)
        tcp = started.enter_context(Tcp(m, n, fill))
        one, two = (started.enter_context(Readers(ours, ids)) for ids in ((1,), (2, 3)))
        sampling = [Entry(OURS, ours.sample), Entry(TCP, tcp.sample)]
        sampling += [Entry(IN_PLACE, one.sample), Entry(IN_PLACE_TWO, two.sample)]
        inserting = [Entry(OURS_NAMED, ours.insert_named), Entry(OURS, ours.insert_packed)]
        for form, reverb in reverbs.items():
            called = FORMS[form]
            sampling += [Entry(f"{called}, {how}", partial(reverb.sample, how)) for how in SAMPLE_METHODS]
            inserting += [Entry(f"{called}, {how}", partial(reverb.insert, how)) for how in INSERT_METHODS]
        yield from take_turns(sampling, subject=task, what=SAMPLE, turns=turns, seconds=seconds)
        yield from take_turns(ways(ours), subject=task, what=WAYS, turns=turns, seconds=seconds)
        yield from take_turns(inserting, subject=task, what=INSERT, turns=turns, seconds=seconds)


def reverbs_for(started: ExitStack, python: Path | None, m: int, n: int, sampling: str) -> dict[str, Reverb]:
    """Reverb by the form of its transitions; none where it is not there."""
    if python is None:
        return {}
    return {form: started.enter_context(Reverb(python, m, n, form, sampling)) for form in FORMS}


def ways(ours: Ours) -> list[Entry]:
    """The replay's own ways to draw: an own share is to cost a tenth at most."""
    return [
        Entry(OURS, ours.sample),
        Entry(SHARE, partial(ours.sample_by, Sampling(own_share=0.5))),
        Entry(PRIORITIES, partial(ours.sample_by, BY_PRIORITY)),
    ]


def measure_priorities(
    runner: asyncio.Runner, task: str, python: Path | None, *, turns: int, seconds: float, fill: int
) -> list[Figure]:
    """Batches by priorities, each of whose transitions is given a new one."""
    m, n = TASKS[task]
    with ExitStack() as started:
        ours = started.enter_context(Ours(runner, m, n, capacity=fill))
        ours.fill(fill)
        entries = [Entry(OURS, partial(ours.sample_by, BY_PRIORITY))]
        for form, reverb in reverbs_for(started, python, m, n, "prioritised").items():
            reverb.fill(fill)
            entries += [Entry(f"{FORMS[form]}, {how}", partial(reverb.learn, how)) for how in SAMPLE_METHODS]
        return take_turns(entries, subject=task, what=LEARN, turns=turns, seconds=seconds)


def memory_of(filled: "Ours | Reverb", who: str, task: str, fill: int) -> Iterator[Figure]:
    """What a server grows by for each transition: from empty to full, and from a tenth to full.

    The second leaves out what it keeps for messages, however many transitions it holds.
    """
    empty = resident_bytes(filled.server_pid)
    filled.fill(fill // 10)
    begun = resident_bytes(filled.server_pid)
    filled.fill(fill - fill // 10)
    full = resident_bytes(filled.server_pid)
    for what, grown, by in ((MEMORY, full - begun, fill - fill // 10), (ALL_MEMORY, full - empty, fill)):
        yield Figure(machine(), os.getloadavg()[0], task, what, who, 0, grown / by)


# --- the tables ---------------------------------------------------------------------------------------------


def tables(figures: Sequence[Figure]) -> str:
    """The figures and the ratios as Markdown."""
    return "\n\n".join((conditions(figures), rates(figures), comparison(figures), memory(figures)))


def rates(figures: Sequence[Figure]) -> str:
    """What was measured, each on a line."""
    rows = []
    for what in (SAMPLE, WAYS, INSERT, LEARN):
        for task in TASKS:
            for who in dict.fromkeys(f.who for f in values(figures, what=what, subject=task)):
                found = values(figures, what=what, subject=task, who=who)
                low, high = min(f.value for f in found), max(f.value for f in found)
                rows.append(
                    (
                        task,
                        what,
                        who,
                        f"{median(found):,.0f} ({low:,.0f} to {high:,.0f})",
                        f"{median(found, 'client_us'):,.1f}",
                        f"{median(found, 'server_us'):,.1f}",
                    )
                )
    return markdown(("task", "what", "who", "a second", "client CPU µs", "server CPU µs"), rows)


def best_of(figures: Sequence[Figure], task: str, what: str, whose: str) -> list[Figure]:
    """The figures of the fastest of the ways whose names begin so; none where there is no such way."""
    ways = {figure.who for figure in figures if figure.who.startswith(whose)}
    found = [values(figures, subject=task, what=what, who=way) for way in ways]
    return max((each for each in found if each), key=median, default=[])


def comparison(figures: Sequence[Figure]) -> str:
    """How many times as fast the replay is, beside what is asked of it."""
    rows = []
    for (what, task), asked in ASKED.items():
        for rival, wanted in asked.items():
            its = best_of(figures, task, what, FORMS.get(rival, rival))
            who = OURS_NAMED if what == INSERT and rival == "named" else OURS
            rows += compared(values(figures, subject=task, what=what, who=who), its, wanted)
    for task, pairs in ASKED_IN_PLACE.items():
        for (who, rival), wanted in pairs.items():
            mine, its = (values(figures, subject=task, what=SAMPLE, who=each) for each in (who, rival))
            rows += compared(mine, its, wanted)
    head = ("task", "what", "who", "against", "times as fast", "CPU time of it over ours", "asked", "met")
    return markdown(head, rows)


def compared(mine: Sequence[Figure], its: Sequence[Figure], wanted: float) -> list[tuple[str, ...]]:
    """A line of that table; none where there are no figures of both."""
    if not mine or not its:
        return []
    wall, first = ratios(mine, its), mine[0]
    busy = (median(its, "client_us") + median(its, "server_us")) / (
        median(mine, "client_us") + median(mine, "server_us")
    )
    told = mean_ratio(wall) if len(wall) > 1 else f"{wall[0]:.3f}"
    met = "yes" if median_of(wall) >= wanted else "**no**"
    return [(first.subject, first.what, first.who, its[0].who, told, f"{busy:.2f}", f"{wanted:g}", met)]


def median_of(found: Sequence[float]) -> float:
    """The middle value."""
    return sorted(found)[len(found) // 2]


def memory(figures: Sequence[Figure]) -> str:
    """Resident memory by transition."""
    found = values(figures, what=MEMORY)
    row = {figure.subject: figure.value for figure in values(found, who=ROW)}
    whole = {(figure.subject, figure.who): figure.value for figure in values(figures, what=ALL_MEMORY)}
    rows = [
        (
            each.subject,
            each.who,
            f"{each.value:,.0f}",
            f"{each.value / row[each.subject] - 1:+.1%}",
            f"{whole[each.subject, each.who]:,.0f}",
        )
        for each in found
    ]
    return markdown(("task", "who", MEMORY, "over the row", ALL_MEMORY), rows)


# --- command line -------------------------------------------------------------------------------------------


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a round")
    parser.add_argument("--task", choices=tuple(TASKS), help="only this one")
    parser.add_argument("--quick", action="store_true", help="one turn of short rounds")
    parser.add_argument("--reverb", type=Path, default=REVERB_PYTHON, metavar="PYTHON", help="its Python")
    answer(parser, measure_and_keep, tables)


def measure_and_keep(given: argparse.Namespace) -> list[Figure]:
    """All figures; written to a file where one is named."""
    turns, seconds, fill = (1, 0.1, 2_000) if given.quick else (given.turns, given.seconds, FILL)
    python = given.reverb if given.reverb.exists() else None
    if python is None:
        print(f"Reverb is left out: there is no {given.reverb} (scripts/get_reverb.sh)", file=sys.stderr)
    keep_freed_memory()  # as every node does
    found: list[Figure] = []
    with asyncio.Runner() as runner:
        for task in (given.task,) if given.task else TASKS:
            for part in (measure, measure_priorities):
                found += part(runner, task, python, turns=turns, seconds=seconds, fill=fill)
            if given.results:
                write_figures(given.results, found)
    return found


if __name__ == "__main__":
    main()
