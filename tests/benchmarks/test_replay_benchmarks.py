"""Benchmarks of the replay: their arithmetic, quick runs, and the page that is made of their results."""

import os
import sys
from pathlib import Path
from statistics import median

import pytest
from children import ran

from dase_grpc.errors import DaseError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measuring(script):
    return script("measuring")


@pytest.fixture
def against(script):
    return script("against_reverb")


@pytest.fixture
def growth(script):
    return script("growth")


@pytest.fixture
def page(script):
    return script("page")


def figure(measuring, who, value, *, turn=0, what="batches/s", subject="narrow", server_us=1.0):
    return measuring.Figure("a machine", 0.5, subject, what, who, turn, value, 1.0, server_us)


def test_entries_take_turns_that_begin_with_another_each_time_after_one_that_warms_up(measuring):
    played = []

    def entry(who):
        return measuring.Entry(
            who, lambda seconds: played.append(who) or measuring.Round(10, 2.0, 1e-3, 2e-3)
        )

    found = measuring.take_turns([entry("a"), entry("b")], subject="s", what="w", turns=2, seconds=2.0)
    assert played == ["a", "b", "a", "b", "b", "a"]
    assert [(each.who, each.turn) for each in found] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]
    assert {(each.value, round(each.client_us), round(each.server_us)) for each in found} == {(5.0, 100, 200)}


def test_figures_come_back_from_their_file(measuring, tmp_path):
    found = [figure(measuring, "a", 12.5), figure(measuring, "b", 3.0, turn=1)]
    measuring.write_figures(tmp_path / "new/file.csv", found)
    assert measuring.read_figures(tmp_path / "new/file.csv") == found


@pytest.mark.parametrize(
    "reader", ["complexity_table.read_results", "measuring.read_figures", "update_tables.read_timed"]
)
def test_another_file_is_refused(script, tmp_path, reader):
    module, _, name = reader.partition(".")
    read, other = getattr(script(module), name), tmp_path / "other.csv"
    for text, said in (("agent\n1\n", "no results of this benchmark"), ("agent\n", "no line of results")):
        other.write_text(text)
        with pytest.raises(DaseError, match=said):
            read(other)
    with pytest.raises(DaseError, match="cannot read"):
        read(tmp_path)


def test_the_processor_time_and_memory_of_this_process_are_plausible(measuring):
    assert 0 < measuring.cpu_s(os.getpid()) < 36_000
    assert measuring.resident_bytes(os.getpid()) > 10 * 2**20


def test_the_comparison_is_with_the_fastest_way_to_use_reverb_turn_by_turn(measuring, against):
    slow, fast = (f"{against.FORMS['named']}, {how}" for how in against.SAMPLE_METHODS)
    found = [
        figure(measuring, who, value * (1 + turn), turn=turn, server_us=busy)
        for turn in range(3)
        for who, value, busy in ((against.OURS, 260, 1), (slow, 10, 9), (fast, 20, 7), (against.TCP, 2600, 1))
    ]
    rows = [line for line in against.comparison(found).splitlines() if "narrow" in line]
    assert [line.strip("| ").split(" | ")[3:] for line in rows] == [
        [fast, "13.000 (13.000 to 13.000)", "4.00", "12", "yes"],
        [against.TCP, "0.100 (0.100 to 0.100)", "1.00", "0.25", "**no**"],
    ]


def test_memory_is_held_against_the_row(measuring, against):
    found = [
        figure(measuring, who, value, what=what)
        for what in (against.MEMORY, against.ALL_MEMORY)
        for who, value in ((against.ROW, 176.0), (against.OURS, 184.8))
    ]
    assert "| narrow | DASE | 185 | +5.0% | 185 |" in against.memory(found)


def test_growth_finds_the_line_that_a_batch_lies_on(measuring, growth):
    sizes = {m: 4 * (2 * m + 10) * growth.BATCH for m in (4, 64, 1024)}
    found = [
        figure(measuring, str(m), 1.0, subject="observation components", server_us=30 + 100 * size / 2**20)
        for m, size in sizes.items()
    ]
    assert "is 30 µs + 100 µs per MiB; the point farthest from this line is 0% off" in growth.line_through(
        found
    )


def test_a_section_of_the_page_is_replaced_and_a_missing_one_named(page):
    text = "before\n<!-- growth -->\nold\n<!-- end of growth -->\nafter\n"
    assert page.put(text, "growth", "new\n") == text.replace("old", "new")
    with pytest.raises(page.PageError, match="no section between <!-- run_time -->"):
        page.put(text, "run_time", "new")


@pytest.mark.slow
def test_the_pages_have_the_tables_of_the_committed_results(page):
    for name, sections in page.PAGES.items():
        text = (page.DOCS / name).read_text(encoding="utf-8")
        assert page.filled(text, sections, page.RESULTS) == text
        assert all(f"<!-- {section} -->" in text for section in sections)


def test_the_page_about_serving_says_what_a_delay_gained_in_the_committed_results(measuring):
    figures = measuring.read_figures(ROOT / "docs/results/serving.csv")

    def rate(subject, who):
        found = [each for each in figures if (each.subject, each.who) == (subject, who)]
        return median(each.value for each in found if each.what == "requests/s")

    gains = [
        rate(clients, "run, 1 ms delay") / rate(clients, "run")
        for clients in ("64 clients", "8 clients", "1 client")
    ]
    said = (
        "{:.2f} times as many answers with 64 clients, {:.2f} times as many with 8 and {:.2f} times as many"
    )
    assert said.format(*gains) in (ROOT / "docs/serving.md").read_text(encoding="utf-8")


def test_run_times_are_compared_by_turns_and_by_the_agents_that_share_a_core(script, tmp_path):
    results, run_time = script("complexity_table"), script("run_time")

    def run(variant, agents, turn, run_s):
        measured = ("td3", variant, turn, agents, 10, 10, run_s, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0, 1.0)
        return results.Measured(*measured, None, None, "", 0.0, 0.0)

    runs = [run("single", 1, 0, 10.0), run("processes", 4, 0, 30.0), run("single", 1, 1, 11.0)]
    runs += [run("processes", 4, 1, 33.0), run("processes", 2, 1, 12.1), run("processes", 4, 2, 99.0)]
    runs += [run("apart", 2, 0, 10.2), run("apart", 2, 1, 12.1)]
    where = run_time.Machine("a machine", 2)
    lines = [line.strip("| ").split(" | ") for line in run_time.table(runs, where.cores).splitlines()[2:]]
    assert [line[0] for line in lines] == ["single", "2 singles, apart", "K = 2", "K = 4"]
    assert lines[1][2:4] == ["+6 % (+2 to +10)", ""]
    assert [lines[2][column] for column in (2, 3, 5)] == ["+10 %", "+0 %", "+10 %"]
    assert lines[2][-1] == "+265 to +271 %"
    assert lines[3][2:4] == ["+200 % (+200 to +200)", ""]
    assert lines[3][5] == "+50 % (+50 to +50)"
    run_time.write_runs(tmp_path / "runs.csv", runs, where)
    assert run_time.read_runs(tmp_path / "runs.csv") == (runs, where)


THEIRS = {
    "TD3.py": """
class TD3:
    def __init__(self, m, n, limit, policy_noise, noise_clip, policy_freq):
        self.n = n
    def select_action(self, state):
        return [0.0] * self.n
    def update_parameters(self, buffer, batch_size):
        assert batch_size == 256 and len(buffer.rows) > 5
""",
    "utils.py": """
class ExperienceReplayBuffer:
    def __init__(self, m, n):
        self.rows = []
    def add(self, *row):
        self.rows.append(row)
""",
}


@pytest.mark.long
def test_agents_that_share_nothing_but_the_machine_are_one_run_as_long_as_the_slowest(script):
    complexity, run_time = script("complexity"), script("run_time")
    plan = complexity.Plan("InvertedPendulum-v5", 1, warmup=5, updates=7)
    found = run_time.measure_apart(plan, 2, repeat=1)
    assert (found.variant, found.agents, found.updates, found.steps) == ("apart", 2, 14, 22)
    assert 0 < found.cpu_s <= 2 * found.run_s + 0.2
    assert found.others_cores >= 0


@pytest.mark.long
def test_the_authors_agent_is_run_beside_from_a_copy_of_their_code(script, tmp_path):
    complexity, run_time = script("complexity"), script("run_time")
    plan = complexity.Plan("InvertedPendulum-v5", 1, warmup=5, updates=7)
    with pytest.raises(run_time.RunFailedError, match=r"does not run: FileNotFoundError: no TD3\.py under"):
        run_time.measure_authors(plan, tmp_path, repeat=0)
    for folder in ("agents", "DDPG & TD3", "SAC"):  # each algorithm has a utils.py of its own
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "utils.py").write_text("")
    for name, text in THEIRS.items():
        (tmp_path / "DDPG & TD3" / name).write_text(text)
    found = run_time.measure_authors(plan, tmp_path, repeat=3)
    assert (found.variant, found.repeat, found.updates, found.steps) == ("authors", 3, 7, 12)
    assert 0 < found.cpu_s <= found.run_s + 0.1
    line = run_time.table([found], 2).splitlines()[-1]
    assert line.startswith("| authors' single |")


# --- runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_replay_is_measured_beside_a_bare_socket_where_reverb_is_not_there(tmp_path):
    program = (sys.executable, ROOT / "benchmarks/against_reverb.py")
    given = ("--quick", "--task=narrow", f"--reverb={tmp_path / 'none'}")
    done = ran(*program, *given, f"--results={tmp_path / 'results.csv'}", check=True)
    assert "Reverb is left out" in done.stderr
    assert "| narrow | batches/s | bare TCP |" in done.stdout
    assert "Traceback" not in done.stderr
    assert ran(*program, f"--show={tmp_path / 'results.csv'}", check=True).stdout == done.stdout


@pytest.mark.slow
def test_growth_is_measured_over_learners_and_widths(growth, measuring):
    sizes = {"learners": (1, 3), "observation components": (4, 16)}
    found = list(growth.measure(sizes, turns=1, seconds=0.05, held=300))
    assert [(each.subject, each.who) for each in found] == [
        (what, str(size)) for what, grown in sizes.items() for size in grown
    ]
    assert all(each.value > 0 for each in found)
    assert "| 3 |" in growth.tables(found)
