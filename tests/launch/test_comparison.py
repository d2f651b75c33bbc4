"""What `dase compare` shows on a terminal."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import flat, write_run

from dase_grpc.launch.console import compare_here, lines
from dase_grpc.runs.reports.comparison_tables import FILES, Table


def shown(
    *paths: Path, folder: Path, unfinished: bool = False, width: int = 160
) -> tuple[list[str], list[str]]:
    """The lines for the reader and those that warn, blanks folded."""
    out, err = (Console(file=io.StringIO(), width=width) for _ in range(2))
    compare_here(paths, folder, unfinished=unfinished, console=out, warnings=err)
    texts = [console.file.getvalue() for console in (out, err)]  # type: ignore[attr-defined]
    first, second = ([re.sub(" +", " ", line).strip() for line in text.splitlines()] for text in texts)
    return first, second


@pytest.mark.slow
def test_scores_chances_and_published_numbers_are_shown_with_the_files(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for seed, value in enumerate((1000.0, 3000.0)):
        write_run(runs, f"single{seed}", flat(value), seed=seed)
        write_run(runs, f"pair{seed}", flat(value + 500), flat(value + 1500), seed=seed)
    write_run(runs, "five", *[flat(5000)] * 5)
    out, err = shown(runs, folder=tmp_path / "out")
    for line in (
        "HalfCheetah-v5: up to step 100,000 of each agent, 101 common evaluations",
        "single 2 2,000 ± 1,414 2,000 ± 1,414 2,000 ± 1,414",
        "IQM 2,000 [1,000, 3,000]† IQM 2,000 [1,000, 3,000]†",
        "HalfCheetah-v5: at equal total steps, 100,000 of all agents of a run together",
        "DASE K=2 50,000 3,000 ± 1,414",
        "DASE K=2 single 0.75 [0.00, 1.00]†",
        "DASE K=5 single 1.00",
        "HalfCheetah-v5: beside what was published for HalfCheetah-v2, at the same step",
        "DASE K=2 50k 3,000 ± 1,414 2,567 ± 195 dase-k2 own; rank 15/30",
        "DASE K=5 50k 5,000 2,646 ± 106 dase-k5 combination: carries no information of its own",
    ):
        assert line in out, line
    assert any(line.startswith("One run is one sample") for line in out)
    assert out[-len(FILES) :] == [str(tmp_path / "out" / name) for name in FILES]
    assert err[err.index("caution: 1 run, so no interval:") + 1] == "HalfCheetah-v5: DASE K=5"


@pytest.mark.slow
def test_runs_that_are_left_out_are_warned_of(tmp_path: Path) -> None:
    good = write_run(tmp_path / "runs", "good", flat(1))
    going = write_run(tmp_path / "runs", "going", flat(2, 50), steps=100_000, seed=1)
    damaged = write_run(tmp_path / "runs", "damaged", flat(2), seed=2)
    (damaged / "run.toml").write_text("?")
    out, err = shown(tmp_path / "runs", folder=tmp_path / "out")
    assert "TD3, single 1 1.00 1.00 1.00" in out
    assert any(line.startswith(f"warning: {going} is left out: it has not finished") for line in err)
    assert any(
        line.startswith(f"warning: {damaged} is left out: {damaged}/run.toml is damaged") for line in err
    )
    assert not any(str(good) in line for line in err)
    out, err = shown(tmp_path / "runs", folder=tmp_path / "out", unfinished=True)
    assert "TD3, single 2 (1 unfinished) 1.50 ± 0.71 1.50 ± 0.71 1.50 ± 0.71" in out


@pytest.mark.parametrize("width", [20, 80])
def test_a_narrow_terminal_loses_no_label(tmp_path: Path, width: int) -> None:
    write_run(
        tmp_path / "runs",
        "a",
        flat(1),
        settings={"dps": {"divergence": "none"}, "env": {"id": "[red]E[/red]"}},
    )
    out, _ = shown(tmp_path / "runs", folder=tmp_path / "out", width=width)
    assert "…" not in "".join(out)
    assert "[red]E[/red]" in "".join(out).replace(" ", "")


@pytest.mark.parametrize("width", [36, 53, 80])
def test_what_has_no_room_beside_stands_below_and_no_word_is_broken(width: int) -> None:
    label = "TD3, DASE\u00a0K=2, divergence=isolated"
    numbers = ("2,000\u00a0±\u00a01,414\nIQM\u00a02,000 [1,000,\u00a03,000]†",) * 3
    table = Table("scores", ("", "final score", "area", "best"), ((label, *numbers), ("single", *numbers)))
    shown = list(lines(table, width))
    assert max(map(len, shown)) <= width
    words = " ".join(shown).split()
    blocks = sum(line.startswith("─") for line in shown)
    assert words.count("divergence=isolated") == words.count("single") == blocks
    assert words.count("3,000]†") == 2 * 3
    assert blocks == {36: 3, 53: 2, 80: 1}[width]
