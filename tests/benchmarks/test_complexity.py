"""The arithmetic of the complexity benchmark, and one measured run; its figures are in docs/results."""

import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

ROLLUP = """\
559264a56000-7fff20361000 ---p 00000000 00:00 0                          [rollup]
Rss:                1708 kB
Pss:                 287 kB
Pss_Anon:            116 kB
Pss_File:            171 kB
Shared_Clean:       1544 kB
Anonymous:           124 kB
"""


@pytest.fixture
def tree(script):
    return script("process_tree")


@pytest.fixture
def results(script):
    return script("complexity_table")


@pytest.fixture
def complexity(script):
    return script("complexity")


def run(results, variant, repeat=0, **changes):
    """A measured run of simple numbers."""
    agents = 1 if variant == "single" else 2
    counted = {"agents": agents, "steps": 199 * agents, "updates": 100 * agents}
    times = {"run_s": 10.0, "core_wait_s": 4.0, "startup_s": 3.0, "cpu_s": 8.0, "cpu_total_s": 12.0}
    memory = {"ram_mib": 400.0, "pss_mib": 300.0, "rss_mib": 500.0, "at_peak": "launcher 280+120"}
    others = {"gpu_allocated_mib": None, "gpu_reserved_mib": None, "others_cores": 0.25, "load": 1.5}
    known = {"algorithm": "td3", "variant": variant, "repeat": repeat, **counted, **times, **memory, **others}
    return results.Measured(**{**known, **changes})


# --- memory -----------------------------------------------------------------------------------------------


def test_a_rollup_is_read_in_bytes(tree):
    assert tree.parse_rollup(ROLLUP) == tree.Memory(
        rss=1708 * 1024, pss=287 * 1024, own=116 * 1024, mapped=(1708 - 124) * 1024
    )


def test_a_kernel_that_does_not_split_the_pss_is_named(tree):
    with pytest.raises(ValueError, match=r"'Pss_Anon'; Linux 5\.9"):
        tree.parse_rollup(ROLLUP.replace("Pss_Anon", "Pss_Other"))


def test_files_that_several_processes_map_count_once(tree):
    big, small = tree.Memory(500, 300, 100, 400), tree.Memory(250, 150, 50, 200)
    assert tree.counted_once([big, small]) == 100 + 50 + 400
    assert tree.counted_once([]) == 0


def test_the_memory_of_this_process_is_plausible(tree):
    memory = tree.read_memory(os.getpid())
    assert 0 < memory.pss <= memory.rss
    assert memory.rss - 2**20 < memory.own + memory.mapped < memory.rss + 2**20
    assert memory.own > 10 * 2**20


def test_an_ended_process_has_no_memory(tree):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert tree.read_memory(ended.pid) is None


@pytest.mark.slow
def test_a_tree_sees_children_and_remembers_the_time_of_those_that_ended(tree):
    inner = "data = b'x' * (64 << 20); print('ready', flush=True); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}, 'inner']); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        watched = tree.ProcessTree(
            process.pid, clock=lambda: 7.0, name=lambda line: "inner" if line[-1] == "inner" else "outer"
        )
        assert process.stdout.readline() == "ready\n"
        both = watched.sample()
        process.stdin.write("\n\n")
        process.stdin.close()
    after = watched.sample()
    assert both.at == 7.0
    assert both.memory.keys() == {"inner", "outer"}
    assert both.memory["inner"].own > 64 * 2**20 > both.memory["outer"].own
    assert both.waited_s.keys() == {"inner", "outer"}
    assert both.cpu_s["inner"] > 0
    assert after.cpu_s.keys() == {"inner", "outer"}
    assert not after.memory


def test_seconds_between_two_moments_are_interpolated(tree):
    seen = ((0, 10, {"a": 1}), (2, 12, {"a": 5, "b": 1}), (4, 16, {"a": 5, "b": 3}))
    samples = [tree.Sample(*each, {}, {}) for each in seen]
    assert tree.busy_s_between(samples, 1, 3) == 3
    assert tree.busy_s_between(samples, -1, 9) == 6
    assert tree.cpu_s_between(samples, "a", 1, 3) == 2
    assert tree.cpu_s_between(samples, "b", 1, 3) == 1.5


def test_the_longest_wait_is_that_of_one_thread_between_two_moments(tree):
    waits = [{1: 5.0}, {1: 5.5, 2: 0.0}, {1: 6.0, 2: 2.0}, {2: 4.0}]
    samples = [
        tree.Sample(at, 0, {}, {}, {"a": waited_s, "b": {3: 9.0 * at}}) for at, waited_s in enumerate(waits)
    ]
    assert tree.longest_wait_s(samples, "a", 0, 3) == 4
    assert tree.longest_wait_s(samples, "a", 0, 1.5) == 1
    assert tree.longest_wait_s(samples, "a", 0, 0.5) == 0.25
    assert tree.longest_wait_s(samples, "c", 0, 1) == 0


def test_every_thread_of_a_process_has_a_wait(tree):
    ended, begun = threading.Event(), threading.Barrier(2)
    other = threading.Thread(target=lambda: (begun.wait(), ended.wait()))
    other.start()
    begun.wait()
    try:
        waits = tree.read_waits(os.getpid())
    finally:
        ended.set()
        other.join()
    assert {other.native_id, threading.get_native_id()} <= waits.keys()
    assert all(waited_s >= 0 for waited_s in waits.values())


def test_the_peak_is_the_sample_with_the_most_memory(tree):
    low, high = tree.Memory(10, 9, 4, 6), tree.Memory(30, 9, 20, 10)
    samples = [tree.Sample(at, 0, {}, {"a": memory}, {}) for at, memory in enumerate([low, high, low])]
    assert tree.peak(samples) is samples[1]


# --- the table --------------------------------------------------------------------------------------------


def test_an_increase_is_in_percent_of_the_single_agent(results):
    assert results.increase_percent(30, 10) == 200
    assert results.increase_percent(10, 10) == 0
    assert results.increase_percent(9, 10) == pytest.approx(-10)


def test_an_increase_compares_runs_of_the_same_turn(results):
    runs = [
        run(results, "single", 0, run_s=10),
        run(results, "threads", 0, run_s=30),
        run(results, "threads", 1, run_s=80),
        run(results, "single", 1, run_s=40),
        run(results, "threads", 2, run_s=99),  # its single run is missing
        run(results, "single", 0, run_s=1, algorithm="sac"),
    ]
    assert results.increases(runs, algorithm="td3", variant="threads", figure="run_s") == [200, 100]


def test_the_table_has_medians_ranges_and_the_paper_s_figures(results):
    runs = [run(results, "single", turn, run_s=10, cpu_s=5) for turn in range(3)]
    runs += [
        run(
            results, "processes", turn, run_s=12 + turn, ram_mib=1000, gpu_allocated_mib=1, gpu_reserved_mib=8
        )
        for turn in range(3)
    ]
    lines = results.table(runs).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1
    assert cells[2][:7] == ["td3", "single", "400", "", "n/a", "10.0 (10.0 to 10.0)", ""]
    assert cells[2][7:] == ["6.0", "", "", "10", "0.50", "20", "3.0"]
    assert cells[3][2:5] == ["1,000", "+150 % (+150 to +150)", "1 (8 reserved)"]
    assert cells[3][5:7] == ["13.0 (12.0 to 14.0)", "+30 % (+20 to +40)"]
    assert cells[3][7:10] == ["9.0", "+50 % (+33 to +67)", "+265 to +271 %"]


def test_the_paper_s_figures_stand_beside_two_agents_alone(results):
    assert "+486" in results.table([run(results, "threads")])
    assert "+486" not in results.table([run(results, "threads", agents=3)])


def test_results_come_back_from_their_file(results, tmp_path):
    runs = [run(results, "single"), run(results, "threads", gpu_allocated_mib=1.5, gpu_reserved_mib=2.0)]
    file = tmp_path / "new/results.csv"
    with results.results_file(file) as writer:
        for each in runs:
            writer.writerow(results.as_row(each))
    assert results.read_results(file) == runs


# --- runs -------------------------------------------------------------------------------------------------


def test_a_run_is_the_paper_s_but_shorter_and_hardly_evaluated(complexity):
    plan = complexity.Plan("Hopper-v5", agents=3, warmup=1000, updates=500)
    config = plan.configuration("ddpg", "threads", seed=4)
    assert (config.agent.algorithm, config.agent.hidden, config.agent.batch_size) == ("ddpg", (400, 300), 256)
    assert (config.train.agents, config.train.steps, config.train.seed) == (3, 1499, 4)
    assert (config.eval.every, config.eval.episodes, config.eval.max_episode_steps) == (1499, 1, 1)
    assert plan.configuration("ddpg", "single", seed=4).train.agents == 1


def test_variants_take_turns_that_begin_with_another_each_time(complexity, monkeypatch):
    done = []
    monkeypatch.setattr(
        complexity,
        "measure",
        lambda plan, *, algorithm, variant, repeat: done.append((plan.updates, algorithm, variant, repeat)),
    )
    plan = complexity.Plan("Hopper-v5", 2, warmup=30, updates=40)
    assert len(list(complexity.measure_all(plan, ["td3", "sac"], repeats=2))) == 16
    warm, measured = done[:4], done[4:]
    assert {updates for updates, *_ in warm} == {20}
    assert [variant for _, name, variant, turn in measured if (name, turn) == ("sac", 0)] == [
        "single", "lockstep", "threads", "processes",
    ]  # fmt: skip
    assert [variant for _, name, variant, turn in measured if (name, turn) == ("td3", 1)] == [
        "lockstep", "threads", "processes", "single",
    ]  # fmt: skip


def test_each_process_counts_while_its_own_agent_trains(complexity, tree):
    trained = {"learner-0": complexity.Training(0, 2), "learner-1": complexity.Training(1, 4)}
    busy = [{"launcher": at, "learner-0": 10 * at, "learner-1": 100 * at} for at in range(6)]
    waits = [{"launcher": {1: 0.1 * at}, "learner-1": {2: 0.5 * at}} for at in range(6)]
    in_processes = [tree.Sample(at, 0, busy[at], {}, waits[at]) for at in range(6)]
    assert complexity.cpu_s_in(in_processes, trained) == {"launcher": 4, "learner-0": 20, "learner-1": 300}
    assert complexity.core_wait_s(in_processes, trained) == 1.5
    in_threads = [tree.Sample(at, 0, {"launcher": at}, {}, waits[at]) for at in range(6)]
    assert complexity.cpu_s_in(in_threads, trained) == {"launcher": 4}
    assert complexity.core_wait_s(in_threads, trained) == pytest.approx(0.3)


def test_processes_are_named_by_their_role(complexity):
    node = ["python", "-m", "dase_grpc", "node", "--stdin-is-leash"]
    assert complexity.process_name([*node, "--role=replay", "--seed=0"]) == "replay"
    assert complexity.process_name([*node, "--role=learner", "--agent=1"]) == "learner-1"
    assert complexity.process_name(["python", "complexity_variants.py", "threads", "run"]) == "launcher"


def test_a_run_that_fails_says_why(complexity, tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such environment')", "single"]
    with pytest.raises(complexity.RunFailedError, match=r"exit code 1:\nno such environment"):
        complexity.watch(command, log=tmp_path / "log")


def test_a_run_that_does_not_end_is_ended(complexity, tmp_path, monkeypatch):
    monkeypatch.setattr(complexity, "RUN_LIMIT_S", 0.0)
    with pytest.raises(complexity.RunFailedError, match="did not end within"):
        complexity.watch(
            [sys.executable, "-c", "import time; time.sleep(600)", "threads"], log=tmp_path / "log"
        )


def test_gpu_memory_is_summed_over_the_processes_that_noted_it(complexity, script, tmp_path, monkeypatch):
    variants = script("complexity_variants")
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        max_memory_allocated=lambda device: (device + 1) * 2**20,
        max_memory_reserved=lambda device: (device + 1) * 2**21,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    on_gpu = complexity.Plan("Hopper-v5", 2, 1, 1, gpu=0)
    with pytest.raises(complexity.RunFailedError, match="no process has used GPU 0"):
        complexity.gpu_memory_mib(tmp_path, on_gpu)
    variants.write_gpu_note(tmp_path)
    (tmp_path / "other.json").write_text(json.dumps({"allocated": 2**20, "reserved": 2**20}))
    assert complexity.gpu_memory_mib(tmp_path, on_gpu) == (4, 7)
    assert complexity.gpu_memory_mib(tmp_path, complexity.Plan("Hopper-v5", 2, 1, 1)) == (None, None)


def test_without_a_gpu_nothing_is_noted(script, tmp_path, monkeypatch):
    variants = script("complexity_variants")
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    )
    variants.write_gpu_note(tmp_path)
    variants.write_gpu_note(None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        "single",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("lockstep", "threads", "processes")),
    ],
)
def test_each_variant_does_the_planned_work_and_is_measured(complexity, variant):
    plan = complexity.Plan("InvertedPendulum-v5", agents=2, warmup=20, updates=30)
    seen = complexity.measure(plan, algorithm="td3", variant=variant, repeat=0)
    agents = 1 if variant == "single" else 2
    assert (seen.agents, seen.steps, seen.updates) == (agents, 49 * agents, 30 * agents)
    assert 0 < seen.run_s < 60
    assert 0 < seen.startup_s < 90
    assert 0 < seen.cpu_s < seen.cpu_total_s
    assert 0 <= seen.core_wait_s < seen.run_s
    assert 100 < seen.ram_mib <= seen.rss_mib
    processes = ["launcher", "learner-0", "learner-1", "replay"] if variant == "processes" else ["launcher"]
    assert [part.split()[0] for part in seen.at_peak.split("; ")] == processes


@pytest.mark.slow
def test_an_environment_that_does_not_exist_is_one_sentence(complexity):
    plan = complexity.Plan("NoSuchThing-v0", agents=2, warmup=20, updates=30)
    with pytest.raises(complexity.RunFailedError, match="NoSuchThing") as told:
        complexity.measure(plan, algorithm="td3", variant="single", repeat=0)
    assert "Traceback" not in str(told.value)
