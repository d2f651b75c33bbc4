"""Work that is done, then recorded, then replayed: here by traces, for there is no GPU (tracing.py)."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from learning.tracing import Traces

from dase_grpc.learning.agents.graphs import REHEARSALS, Captured, RecordingFailed, recorder_for

CALLS = REHEARSALS + 4


class Adding:
    """Work that adds a number to a total, and counts how often Python does it."""

    def __init__(self):
        self.number, self.total = torch.zeros(()), torch.zeros(())
        self.python = 0

    def __call__(self):
        self.python += 1
        self.total += self.number
        return {"total": self.total * 1, "twice": self.total * 2}


def totals(captured, adding):
    found = []
    for number in range(1, CALLS + 1):
        adding.number.fill_(number)
        results = captured()
        found.append((float(results["total"]), float(results["twice"])))
    return found


EXPECTED = [(n * (n + 1) / 2, n * (n + 1.0)) for n in range(1, CALLS + 1)]


def test_a_cpu_has_no_recorder_and_does_the_work_as_it_is():
    adding = Adding()
    captured = Captured(adding, recorder_for(torch.device("cpu")), name="adding")
    assert totals(captured, adding) == EXPECTED
    assert adding.python == CALLS


@pytest.mark.slow
def test_every_call_does_the_work_once_whether_rehearsed_recorded_or_replayed():
    adding, traces = Adding(), Traces()
    captured = Captured(adding, traces, name="adding")
    assert totals(captured, adding) == EXPECTED
    assert float(adding.total) == EXPECTED[-1][0]
    assert adding.python < CALLS


def test_python_runs_for_the_last_time_when_it_is_recorded_and_results_stay_where_they_are():
    adding, traces = Adding(), Traces()
    captured = Captured(adding, traces, name="adding")
    first, *others = [captured() for _ in range(CALLS)][REHEARSALS:]
    assert adding.python == REHEARSALS + 1
    assert all(results is first for results in others)
    assert len(traces.recorded) == 1


class Unable(Traces):
    def record(self, work):
        self.works = False
        raise RecordingFailed("a stream says no")


def test_where_recording_fails_the_work_goes_on_as_it_is_and_one_warning_says_why(caplog):
    adding, other, unable = Adding(), Adding(), Unable()
    with caplog.at_level(logging.WARNING, logger="dase"):
        assert totals(Captured(adding, unable, name="the update of agent 3"), adding) == EXPECTED
        assert totals(Captured(other, unable, name="another update"), other) == EXPECTED
    assert [record.getMessage() for record in caplog.records] == [
        "the update of agent 3 runs without a CUDA graph, which is slower: a stream says no"
    ]
    assert (adding.python, other.python) == (CALLS, CALLS)


def test_an_error_in_the_work_is_the_callers():
    def broken():
        raise ValueError("out of order")

    with pytest.raises(ValueError, match="out of order"):
        Captured(broken, Traces(), name="broken")()


@pytest.mark.parametrize(
    ("unfit", "error"),
    [
        (lambda x: x * float(x.sum()), RecordingFailed),
        (lambda x: x * x.sum().item(), RecordingFailed),
        (lambda x: x[: int(x[0])], RecordingFailed),
        (lambda x: x[x > 0], AssertionError),
        (lambda x: x.nonzero(), AssertionError),
        (lambda x: x + torch.tensor(1.0), AssertionError),
        (lambda x: x.clone().normal_(), AssertionError),
    ],
    ids=["float", "item", "shape", "mask", "nonzero", "constant", "noise"],
)
def test_a_trace_refuses_what_reads_a_number_on_the_host_waits_for_a_gpu_or_draws(unfit, error):
    values = torch.ones(3)
    with pytest.raises(error):
        Traces().record(lambda: (unfit(values),))


@pytest.fixture
def pretended(monkeypatch):
    """torch.cuda as `Recorder` uses it, noting what is asked in order, and errors at a capture's end."""
    asked, pools, errors = [], [], []

    class Stream:
        def __init__(self, device, name="own"):
            self.name = name

        def wait_stream(self, other):
            asked.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def entered(name, errors=()):
        asked.append(f"enter {name}")
        try:
            yield
        finally:
            asked.append(f"leave {name}")
            for error in errors:
                raise error

    def graph(made, *, pool, stream, capture_error_mode):
        pools.append((pool, stream.name, capture_error_mode))
        return entered("capture", errors)

    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", asked.append)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "current"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered(stream.name))
    monkeypatch.setattr(
        torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: asked.append("replay"))
    )
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return asked, pools, errors


def test_on_a_gpu_work_is_rehearsed_and_recorded_on_one_stream_apart_and_replayed_at_once(pretended):
    asked, pools, _ = pretended
    done = []
    recorder = recorder_for(torch.device("cuda", 0))
    assert asked == ["cusolver"]
    captured = Captured(lambda: done.append("work"), recorder, name="update")
    for _ in range(REHEARSALS + 2):
        captured()
    rehearsal = ["own waits for current", "enter own", "leave own", "current waits for own"]
    recording = ["enter own", "enter capture", "leave capture", "leave own", "replay"]
    assert asked[1:] == [*rehearsal * REHEARSALS, *recording, "replay"]
    assert len(done) == REHEARSALS + 1
    Captured(lambda: None, recorder, name="other")
    assert pools == [("pool", "own", "thread_local")]


def test_on_a_gpu_a_recording_that_fails_says_what_broke_it_and_leaves_the_stream_as_it_was(
    pretended, caplog
):
    asked, _, errors = pretended
    errors.append(RuntimeError("operation failed due to a previous error during capture"))

    def work():
        if "enter capture" in asked:
            asked.remove("enter capture")
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    captured = Captured(work, recorder_for(torch.device("cuda", 0)), name="the update")
    for _ in range(REHEARSALS + 2):
        captured()
    assert asked[-2:] == ["leave capture", "leave own"]
    assert [record.getMessage() for record in caplog.records] == [
        "the update runs without a CUDA graph, which is slower: it cannot be recorded (operation not "
        "permitted when stream is capturing)"
    ]
