"""The figures of update_floor.py: a CSV file of them, and the tables they make for docs/performance.md."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Final

from measuring import markdown, processor
from results_files import read_lines, write_lines

from dase_grpc.config.algorithms import ALGORITHMS

ASKED_OF_FLOOR: Final = 1.25
WAYS: Final[Mapping[str, str]] = {
    "autograd": ", reference twin by autograd",
    "passes": "",
    "left out": ", half of the rows left out",
}
RIVALS: Final[Mapping[str, str]] = {
    "authors td3": "authors' DASE_TD3, DPS included",
    "cleanrl td3": "CleanRL's TD3, which shares nothing",
    "td3 passes": "our update, every row counted",
    "td3 step": "our step, every row counted",
    "td3 left out": "our update, half of the rows left out",
    "td3 step, external vanish": "our step, external weights vanish",
}


@dataclass(frozen=True)
class Timed:
    """What one subject took; ratios are the median of the rounds' own, those named best of the best rounds.

    Attributes:
        machine, load: where it was measured, and the load average when that began.
        mflop: the floating-point operations it needs, in millions; None where they are not counted.
        floor, floor_best: its time over the floor's.
        authors, cleanrl, float32: how many times as fast as these it is; None where there is no such.
    """

    machine: str
    load: float
    what: str
    rounds: int
    median_us: float
    best_us: float
    mflop: float | None = None
    floor: float | None = None
    floor_best: float | None = None
    authors: float | None = None
    authors_best: float | None = None
    cleanrl: float | None = None
    cleanrl_best: float | None = None
    float32: float | None = None
    float32_best: float | None = None


def here() -> str:
    """The processor and the versions that decide the figures."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{processor()}, one core of {os.cpu_count()}, {versions}"


def write_timed(path: Path, found: Sequence[Timed]) -> None:
    """Writes a CSV file, one line for each subject.

    Raises:
        ResultsError: it cannot be written.
    """
    write_lines(path, [field.name for field in fields(Timed)], map(asdict, found))


def read_timed(path: Path) -> list[Timed]:
    """What a CSV file holds.

    Raises:
        ResultsError: it is no such file.
    """
    return read_lines(path, Timed)


def tables(found: Sequence[Timed]) -> str:
    """All tables, as Markdown."""
    known = {each.what: each for each in found}
    product = known["product"]
    assert product.mflop is not None
    rates = [product.mflop / us * 1e3 for us in (product.median_us, product.best_us)]
    parts = [
        f"{product.machine}; load average {product.load:.1f}; processor time, "
        f"{product.rounds} rounds in which all take turns. One product of 256³: {product.median_us:.0f} µs "
        f"(best {product.best_us:.0f}), {rates[0]:.0f} ({rates[1]:.0f}) GF/s; by NumPy "
        f"{known['product by NumPy'].median_us:.0f} ({known['product by NumPy'].best_us:.0f}) µs.",
        markdown(
            ("update", "MFLOP", "floor, best", "median", "best", "median / floor", "best / floor", "asked"),
            _floors(known),
        ),
    ]
    if rounded := list(_rounded(known)):
        parts.append(
            markdown(
                ("products of bfloat16", "median", "best", "times as fast as in float32", "of best"), rounded
            )
        )
    rivals = [known[name] for name in RIVALS if name in known]
    head = ("TD3", "median", "best", "than the authors' DASE_TD3", "than CleanRL's TD3")
    if any(each.authors or each.cleanrl for each in rivals):
        parts.append(markdown(head, (_beside(each) for each in rivals)))
    else:
        parts.append(markdown(head[:3], (_beside(each)[:3] for each in rivals)))
        parts.append("The authors' code and CleanRL's: not measured, for no copy of either was given.")
    act = known["act"]
    parts.append(
        f"One action of one observation: {act.median_us:.0f} µs (best {act.best_us:.0f}); by torch "
        f"{known['act by torch'].median_us:.0f} ({known['act by torch'].best_us:.0f})."
    )
    return "\n\n".join(parts)


def _floors(known: Mapping[str, Timed]) -> Iterator[Sequence[str]]:
    product = known["product"]
    assert product.mflop is not None
    for algorithm in ALGORITHMS:
        for way, told in WAYS.items():
            each = known[f"{algorithm} {way}"]
            assert each.mflop is not None
            yield (
                f"{algorithm.upper()}{told}",
                f"{each.mflop:.0f}",
                f"{each.mflop / product.mflop * product.best_us / 1e3:.2f} ms",
                f"{each.median_us / 1e3:.2f} ms",
                f"{each.best_us / 1e3:.2f} ms",
                _ratio(each.floor),
                _ratio(each.floor_best),
                _met(each) if way == "passes" else "",
            )


def _met(each: Timed) -> str:
    """Whether the time is what is asked for, of the median and of the best rounds."""
    if each.floor is not None and each.floor <= ASKED_OF_FLOOR:
        return f"{ASKED_OF_FLOOR}: yes"
    best = each.floor_best is not None and each.floor_best <= ASKED_OF_FLOOR
    return f"{ASKED_OF_FLOOR}: {'by the best rounds, not by the median' if best else '**no**'}"


def _rounded(known: Mapping[str, Timed]) -> Iterator[Sequence[str]]:
    for name, each in known.items():
        if "bfloat16" in name:
            algorithm, _, rest = name.partition(" bfloat16")
            yield (
                f"{algorithm.upper()}{rest.replace('left out', 'half of the rows left out')}",
                f"{each.median_us / 1e3:.2f} ms",
                f"{each.best_us / 1e3:.2f} ms",
                _ratio(each.float32),
                _ratio(each.float32_best),
            )


def _beside(each: Timed) -> Sequence[str]:
    return (
        RIVALS[each.what],
        f"{each.median_us / 1e3:.2f} ms",
        f"{each.best_us / 1e3:.2f} ms",
        _both(each.authors, each.authors_best),
        _both(each.cleanrl, each.cleanrl_best),
    )


def _both(median: float | None, best: float | None) -> str:
    return "" if median is None else f"{_ratio(median)} ({_ratio(best)})"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
