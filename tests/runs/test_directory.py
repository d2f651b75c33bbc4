"""The run directory and its run.toml."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from contracts.sentences import refuses

from dase_grpc.config.resolve import RunConfig, read_toml, resolve
from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.directory import DISTRIBUTIONS, RunDirectory, derived_seeds, git_revision
from dase_grpc.seeding import Purpose, integer

CREATED = datetime(2026, 5, 4, 3, 2, 1, tzinfo=timezone(timedelta(hours=2)))


def create(root: Path, name: str = "first", config: RunConfig | None = None) -> RunDirectory:
    return RunDirectory.create(
        root,
        name,
        config or RunConfig(),
        mode="cluster",
        command=["dase", "train", "--set", "a b=1"],
        created=CREATED,
    )


def test_a_run_reads_back_as_it_was_created(tmp_path: Path) -> None:
    config = resolve(
        {"env": {"id": "Ant-v5", "kwargs": {"ctrl_cost_weight": 0.1}}, "replay": {"capacity": "512MiB"}}
    )
    created = create(tmp_path, config=config)
    opened = RunDirectory.open(tmp_path / "first")
    assert opened == created
    assert opened.config == config
    assert opened.name == "first"
    assert opened.run["created"] == "2026-05-04T01:02:01+00:00"
    assert opened.run["mode"] == "cluster"
    assert opened.run["command"] == "dase train --set 'a b=1'"


def test_run_toml_is_a_configuration_and_names_versions_and_the_seeds_in_use(
    tmp_path: Path,
) -> None:
    config = resolve({"train": {"agents": 3, "seed": 5}})
    run = create(tmp_path, config=config)
    assert resolve(read_toml(run.path / "run.toml")) == config
    assert {*DISTRIBUTIONS, "python"} <= set(run.versions)
    assert run.versions["torch"].count(".") >= 2
    assert run.run["seeds"]["evaluation"] == integer(5, Purpose.EVALUATION)
    assert run.run["seeds"]["networks"] == [integer(5, Purpose.NETWORKS, agent) for agent in range(3)]
    assert set(derived_seeds(config)) == {"evaluation", "networks", "environment", "target_noise"}


def test_a_folder_that_is_no_checkout_has_no_revision(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert git_revision(tmp_path) is None


def test_create_takes_an_empty_directory_and_leaves_nothing_beside_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "first").mkdir()
    assert create(tmp_path).config == RunConfig()
    with pytest.raises(RunDirectoryError, match=r"first exists and is not empty; choose another name"):
        create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    assert [path.name for path in (tmp_path / "first").iterdir()] == ["run.toml"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden"])
def test_create_refuses_a_name_that_is_no_folder_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirectoryError, match="use a plain folder name"):
        create(tmp_path, name)


def test_create_says_why_the_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        RunDirectoryError, match=r"cannot make the run directory .*: (Not a directory|File exists)"
    ):
        create(tmp_path / "file")
    with pytest.raises(RunDirectoryError, match="cannot make the run directory"):
        create(tmp_path, "file")


@pytest.mark.parametrize("name", [".", "missing"])
def test_open_says_that_there_is_no_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not a run: it has no run\.toml"):
        RunDirectory.open(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        b"[env\n",
        b"\xff\xfe",
        b"",
        b"[run]\nname = 'x'\n",
        b"[nonsense]\nkey = 1\n",
        b"run = 3\n[train]\nsteps = 5\n",
        b"[train]\nsteps = -1\n",
    ],
)
def test_open_says_that_run_toml_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"run\.toml is damaged"):
        RunDirectory.open(tmp_path)


@pytest.mark.parametrize("mode", ["", "mode = 5\n", "mode = [5]\n", "mode = 'quick'\n"])
def test_a_run_that_does_not_say_how_it_was_begun_is_not_guessed_at(tmp_path: Path, mode: str) -> None:
    (tmp_path / "run.toml").write_text(f"[train]\nsteps = 5\n[run]\n{mode}")
    run = RunDirectory.open(tmp_path)
    with refuses(RunDirectoryError, "does not say how the run was begun (mode in", "back which of cluster"):
        run.mode  # noqa: B018
    assert RunDirectory.create(tmp_path, "other", RunConfig(), mode="stack").mode == "stack"


def test_ensure_makes_a_run_once_for_learners_that_start_together(tmp_path: Path) -> None:
    def learner(number: int) -> RunDirectory:
        return RunDirectory.ensure(tmp_path, "shared", RunConfig(), mode="node", command=[str(number)])

    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(learner, range(24)))
    assert all(run == runs[0] for run in runs)
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


def test_ensure_refuses_another_configuration_and_names_the_setting(tmp_path: Path) -> None:
    RunDirectory.ensure(tmp_path, "shared", RunConfig(), mode="node")
    with pytest.raises(RunDirectoryError, match=r"\(train\.seed is 0 there and 1 here\)"):
        RunDirectory.ensure(tmp_path, "shared", resolve({"train": {"seed": 1}}), mode="node")


def test_ensure_does_not_take_a_foreign_directory(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "letters").write_text("mine")
    with pytest.raises(RunDirectoryError, match="exists and is not empty"):
        RunDirectory.ensure(tmp_path, "shared", RunConfig(), mode="node")


def test_the_layout_is_that_of_the_design(tmp_path: Path) -> None:
    run = create(tmp_path)
    agent = run.agent(3)
    assert agent.agent_id == 3
    assert agent.evaluations.path == run.path / "agents/3/evaluations.csv"
    assert agent.metrics.path == run.path / "agents/3/metrics.jsonl"
    assert agent.checkpoints == run.path / "agents/3/checkpoints"
    assert agent.tensorboard == run.path / "agents/3/tensorboard"
    assert (run.logs, run.replay) == (run.path / "logs", run.path / "replay")
    assert run.report == run.path / "report.html"


def test_agents_come_by_number_and_foreign_folders_are_left_out(tmp_path: Path) -> None:
    run = create(tmp_path, config=resolve({"train": {"agents": 11}}))
    assert run.agents() == run.strays() == []
    for name in ("10", "2", "0", "00", "11", "backup"):
        (run.path / "agents" / name).mkdir(parents=True)
    assert [agent.agent_id for agent in run.agents()] == [0, 2, 10]
    assert [path.name for path in run.strays()] == ["00", "11"]


def test_the_time_of_creation_is_now_unless_given(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    run = RunDirectory.create(tmp_path, "now", RunConfig(), mode="lockstep")
    assert datetime.fromisoformat(run.run["created"]) >= before
