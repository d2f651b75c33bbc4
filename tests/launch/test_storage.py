"""Where a cluster's buffer lies, and whether there is room for it."""

import os
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from contracts.sentences import assert_one_sentence
from replay.buffer.store_cases import SCHEMA
from small import new_run, small_config

from dase_grpc.config.algorithms import ALGORITHMS, AgentConfig
from dase_grpc.config.gpus import Gpus
from dase_grpc.config.resolve import resolve
from dase_grpc.errors import ConfigError, DataDirectoryError, RunDirectoryError
from dase_grpc.launch import checks, room
from dase_grpc.launch.checks import check, has_buffer, put_buffer_aside
from dase_grpc.launch.lockstep import open_lockstep, run_lockstep
from dase_grpc.launch.resume import ResumeOptions, buffer_is_gone, resume_here
from dase_grpc.launch.room import (
    free_disk,
    free_memory,
    keeps_on_disk,
    network_bytes,
    networks_bytes,
    require_memory,
    reserve,
)
from dase_grpc.learning.agents.registry import make_agent
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.runs.directory import RunDirectory


def run_on_disk(path) -> SharedRun:
    """A replay at work in a folder."""
    run = SharedRun("run", capacity=10, min_size=1, seed=0, ttl_s=10.0)
    run.keep_in(path, boot_id="b", now=0.0)
    run.join("node", wanted=0, run_id="run", schema=SCHEMA, now=0.0)
    return run


def test_the_room_that_a_buffer_takes_is_told_and_nothing_is_made(tmp_path):
    told = reserve(small_config(), SCHEMA, tmp_path / "not" / "there")
    assert told.startswith("buffer on disk: 1")
    assert "MiB are reserved in the run's folder (--set replay.storage=memory keeps it in memory)" in told
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "free_disk", lambda path: 2**20)
    with pytest.raises(
        ConfigError, match=r"of disk in .*, and 1\.0 MiB are free; free space there"
    ) as caught:
        reserve(small_config(), SCHEMA, tmp_path)
    assert_one_sentence(caught.value)
    told = reserve(small_config(replay__storage="memory"), SCHEMA, tmp_path)
    assert told == "buffer in memory: it ends with the replay's process"
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"the buffer takes [\d,.]+ [MG]iB of disk in"):  # than any disk
        reserve(small_config(replay__capacity=10**15), SCHEMA, tmp_path)


@pytest.mark.parametrize("check", [require_memory, partial(reserve, root=Path("/"))])
def test_a_buffer_in_memory_that_cannot_fill_up_there_is_refused_with_both_sizes(monkeypatch, check):
    kept = partial(small_config, replay__storage="memory", replay__capacity="1GiB", train__agents=2)
    networks = networks_bytes(kept(), SCHEMA, None)
    monkeypatch.setattr(room, "free_memory", lambda: 100 * SCHEMA.row_bytes + networks)
    with pytest.raises(ConfigError, match=r"takes .* MiB of memory when it holds 102 transitions") as caught:
        check(kept(train__steps=51), SCHEMA)
    assert_one_sentence(caught.value, "are available beside the networks; lower replay.capacity")
    check(kept(train__steps=50), SCHEMA)  # which never fills it
    check(small_config(replay__storage="memory", replay__capacity=100, train__steps=51), SCHEMA)


@pytest.mark.parametrize("settings", [{}, {"replay__storage": "memory"}])
@pytest.mark.parametrize("look", [check, partial(check, gpus=Gpus.parse("0"))])
def test_networks_that_find_no_room_in_memory_are_refused_with_both_sizes(monkeypatch, settings, look):
    monkeypatch.setattr(room, "free_memory", lambda: 2**20)
    monkeypatch.setattr(checks, "check_devices", lambda config, gpus: ())
    config = small_config(agent__hidden=[65_536, 16], **settings)
    if look is not check:
        look(config)  # they lie in the GPU's memory
        return
    with pytest.raises(ConfigError) as caught:
        look(config)
    told = "the networks of 2 agents take at least 140.0 MiB of memory, and 1.0 MiB are available; lower "
    assert_one_sentence(caught.value, told + "the numbers in agent.hidden")


def test_the_networks_of_each_member_count(monkeypatch):
    small = {"hidden": [16], "batch_size": 32, "start_steps": 20}
    config = small_config(train__agents=2).model_dump(exclude={"agent"})
    mixed = resolve(config, {"members": [small, {**small, "hidden": [65_536, 64]}]})
    monkeypatch.setattr(room, "free_memory", lambda: 2**20)
    with pytest.raises(ConfigError) as caught:
        check(mixed)
    assert_one_sentence(
        caught.value, "the networks of 2 agents take at least", "lower the numbers in the members' hidden, or"
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_networks_take_is_what_an_agent_makes(algorithm):
    config = AgentConfig(algorithm=algorithm, hidden=(120, 90))
    agent = make_agent(config, SCHEMA, seed=0, agent_id=0, device=torch.device("cpu"))
    gradients = [agent.flats[name].gradient for name in ("actor", "critic")]
    made = sum(each.nbytes for each in [*agent.state_dict().values(), *gradients])
    assert network_bytes(config, SCHEMA) == pytest.approx(made, rel=0.03)


def test_a_buffer_that_a_run_does_not_fill_is_refused_too_where_no_machine_can_reserve_it(tmp_path):
    endless = small_config(replay__storage="memory", replay__capacity=10**14, train__steps=50)
    with pytest.raises(ConfigError, match=r"needs [\d,.]+ GiB, .* which has [\d,.]+ GiB") as caught:
        reserve(endless, SCHEMA, tmp_path)
    assert_one_sentence(caught.value, "lower it")


def test_without_linux_the_buffer_is_in_memory_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keeps_on_disk(small_config())
    assert "since only Linux can keep it on disk" in reserve(small_config(), SCHEMA, tmp_path)


def test_a_buffer_is_found_and_put_aside_but_not_while_a_replay_works_on_it(tmp_path):
    directory = new_run(tmp_path, small_config())
    assert not has_buffer(directory)
    assert put_buffer_aside(directory) is None
    run = run_on_disk(directory.replay)
    for refused in (has_buffer, put_buffer_aside):
        with pytest.raises(DataDirectoryError, match="is in use by another replay"):
            refused(directory)
    run.close()
    assert has_buffer(directory)
    assert put_buffer_aside(directory) == directory.path / "replay-before-resume-1"
    assert not has_buffer(directory)
    run_on_disk(directory.replay).close()
    assert put_buffer_aside(directory) == directory.path / "replay-before-resume-2"


@pytest.mark.parametrize("name", ["buffer.json", "rows", "commits", "leases"])
def test_a_buffer_with_a_damaged_file_is_refused_by_its_name_and_the_way_on_is_said(tmp_path, name):
    directory = new_run(tmp_path, small_config())
    run_on_disk(directory.replay).close()
    damaged = directory.replay / name
    os.truncate(damaged, damaged.stat().st_size - 9)
    with pytest.raises(DataDirectoryError) as caught:
        has_buffer(directory)
    assert_one_sentence(caught.value, f"{damaged} ", "damaged", "; with --empty-buffer the agents go on")
    assert "--data-dir" not in str(caught.value)
    assert put_buffer_aside(directory) is not None


@pytest.mark.slow
def test_a_run_with_a_damaged_buffer_is_not_resumed_and_nothing_of_it_changes(tmp_path):
    settings = small_config(train__agents=1, train__checkpoint_every=60)
    directory = RunDirectory.create(tmp_path, "run", settings, mode="cluster")
    with open_lockstep(settings, directory) as run:  # keeps the checkpoints that a cluster would
        run_lockstep(run, threading.Event(), lambda: None)
    run_on_disk(directory.replay).close()
    os.truncate(directory.replay / "rows", 100)
    before = (directory.path / "run.toml").read_bytes()
    with pytest.raises(DataDirectoryError) as caught:
        resume_here(ResumeOptions(directory.path, steps=1_000))
    assert_one_sentence(caught.value, "replay/rows has 100 bytes instead of", "--empty-buffer")
    assert caught.value.exit_code == 2
    assert (directory.path / "run.toml").read_bytes() == before


def test_a_cluster_without_a_checkpoint_is_not_resumed_and_how_to_begin_anew_is_said(tmp_path, capsys):
    directory = RunDirectory.create(tmp_path, "a run", small_config(train__agents=2), mode="cluster")
    with pytest.raises(RunDirectoryError) as caught:
        resume_here(ResumeOptions(directory.path))
    anew = f"begin anew with dase train --config '{directory.path}/run.toml'"
    assert_one_sentence(caught.value, "no agent of", anew)
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can keep the buffer on disk")
@pytest.mark.parametrize(
    ("kept", "told"),
    [("disk", "is not in its replay/ any more; with"), ("memory", "was kept in memory and is gone; with")],
)
def test_a_buffer_that_is_gone_is_missed_where_it_was(tmp_path, kept, told):
    error = buffer_is_gone(new_run(tmp_path, small_config(replay__storage=kept)))
    assert_one_sentence(error, told, "--empty-buffer")


# -- what the machine has room for -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:   2048 kB\n"}, 2 * 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory.max": "1048576\n"}, 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory.max": "max\n"}, 2 * 2**20),
        ({"meminfo": "MemAvailable: 2048 kB\n", "memory/memory.limit_in_bytes": "4096\n"}, 4096),
        ({"memory.max": "4096\n"}, 4096),
    ],
)
def test_available_memory_is_the_least_of_what_the_machine_has_left_and_a_container_may_have(
    tmp_path, told, expected
):
    for name, text in told.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(proc=tmp_path, cgroups=tmp_path) == expected


def test_where_nothing_is_told_there_is_all_that_the_machine_has(tmp_path):
    everything = free_memory(proc=tmp_path, cgroups=tmp_path)
    assert everything >= free_memory() > 0


def test_a_folder_that_is_not_there_yet_has_what_is_free_around_it(tmp_path):
    assert free_disk(tmp_path / "not" / "there") > 0
