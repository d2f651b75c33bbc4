"""What whoever starts a process may do to it: closed streams, kept signals, few files, foreign variables."""

import logging
import os
import resource
import signal
import subprocess
import sys

import pytest
from patience import PATIENCE_S

from dase_grpc.process import ends, signals


def started(program, *, limit=None, **options):
    """A finished process that ran a program, with at most `limit` open files."""

    def limited():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=limited,
        **options,
    )


@pytest.fixture(autouse=True)
def drawing_as_before(monkeypatch):
    """How matplotlib is to draw comes back."""
    monkeypatch.setenv("MPLBACKEND", os.environ.get("MPLBACKEND", "agg"))
    level = logging.getLogger("matplotlib").level
    yield
    logging.getLogger("matplotlib").setLevel(level)


@pytest.fixture
def files_allowed():
    """Sets the soft limit of open files; the former one comes back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_as_many_files_may_be_opened_as_are_needed_and_allowed(files_allowed, monkeypatch):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_allowed(256)
    for wanted in (300, 200):
        monkeypatch.setattr(ends, "WANTED_OPEN_FILES", wanted)
        ends.put_right()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)


def test_a_process_that_may_open_fewer_files_than_it_may_want_says_so(files_allowed):
    files_allowed(256)
    assert ends.files_short_of(256) is None
    assert ends.files_short_of(4_196) == (
        "this process may have 256 files open, and wants 4196; raise the limit with ulimit -n 4196"
    )


def test_a_process_that_may_open_hardly_any_file_is_refused_with_both_numbers_and_the_remedy():
    ended = started("from dase_grpc.__main__ import run; run()", limit=32)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: this process may have 32 files open, and needs at least 64; raise the limit with ulimit -n "
        "1024, or where the process is started\n"
    )


def test_files_that_run_out_later_are_one_sentence_too():
    runs_out = """
    from dase_grpc import __main__
    from dase_grpc.cli import main as cli
    def main():
        held = []
        while True:
            held.append(open("/dev/null"))
    cli.main = main
    __main__.run()
    """
    ended = started("if True:" + runs_out, limit=100)
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False)
    assert ended.stderr.startswith("error: Too many open files; raise the limit with ulimit -n")


@pytest.mark.parametrize("limit", [64, 128, 1_000])
def test_a_leash_has_a_number_of_its_own_however_few_files_may_be_opened(limit):
    held = f"""
    import os
    from dase_grpc.process import signals
    with signals.leashed(lambda: None):
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        print({min(signals.FIRST_OWN_DESCRIPTOR, limit // 2)} <= highest < {limit})
    """
    ended = started("if True:" + held, limit=limit, stdin=subprocess.PIPE)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_stream_that_is_closed_leaves_its_number_to_no_other_file(closed, tmp_path):
    writes = f"""
    import os, sys
    for number in {closed}:
        os.close(number)
    from dase_grpc.process import ends
    ends.put_right()
    file = open("log", "w")
    print(file.fileno() > 2, file=file)
    print("out")
    print("err", file=sys.stderr)
    assert sys.stdin.read() == ""
    file.write("done")
    """
    ended = started("if True:" + writes, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "log").read_text() == "True\ndone"
    assert ended.stdout == ("" if 1 in closed else "out\n")


def test_ends_of_children_that_are_ignored_and_blocked_signals_are_undone():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        ends.put_right()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        ended = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=False)
        assert ended.returncode == 3
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        signal.signal(signal.SIGCHLD, before)


def test_a_backend_that_is_a_notebooks_does_not_keep_a_report_from_being_drawn(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    ends.put_right()
    assert os.environ["MPLBACKEND"] == "agg"


COUNTS = """
import sys
from dase_grpc.process.ends import put_right
put_right()
from prometheus_client import Counter, generate_latest
from dase_grpc.metrics.endpoint import make_registry
registry = make_registry()
counter = Counter("dase_tries", "Tries.", registry=registry)
counter.inc()
print([line for line in generate_latest(registry).decode().splitlines() if line.startswith("dase_tries")])
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"])
def test_metrics_begin_at_zero_whatever_folder_prometheus_is_told_to_share(name, tmp_path):
    for folder in (tmp_path / "missing", tmp_path):
        for _ in range(2):  # the second would go on from the first, had it the same pid
            ended = started(
                COUNTS, env={**os.environ, name: str(folder), "PROMETHEUS_DISABLE_CREATED_SERIES": "0"}
            )
            assert (ended.stdout, ended.stderr) == ("['dase_tries_total 1.0']\n", "")
        assert list(tmp_path.iterdir()) == []
