"""`dase status` over a real service: what it prints, and what it gives to programs."""

import io
import json
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from nodes.sharding_cases import shards_serving
from observe.clusters import actor, agent, cluster, printed
from patience import PATIENCE_S
from replay.security.credentials import guarded, make_keyring
from replay.wire.services import SCHEMA
from rich.console import Console

from dase_grpc.errors import UnauthenticatedError, UnreachableError
from dase_grpc.observe.once import Told, document, look_twice, page, tell
from dase_grpc.observe.view import ClusterView, Look, Observer, Target, merged, observing, view_of
from dase_grpc.progress import Attendance, Attendant, Progress
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.security.dialler import Credentials
from dase_grpc.replay.wire.addresses import Address, ReplayPlace
from dase_grpc.replay.wire.v1 import cluster_pb2

PROGRESS = replace(agent(0).progress, step=123, updates=45, similarity={0: 1.0, 7: 0.25})


async def told(service, *, apart_s=0.15, others=(), timeout_s=PATIENCE_S) -> Told:
    replays = ReplayPlace((service.address, *others))
    return await look_twice(Target(replays, timeout_s=timeout_s), apart_s=apart_s)


def of(view: ClusterView, **silent) -> Told:
    return Told(Look(0.0, view), Look(1.0, view, silent), "127.0.0.1:50051")


def lines_of(shown: Told, *, width: int = 200) -> list[str]:
    return [line for part in page(shown, width=width) for line in printed(part, width=width)]


async def test_all_that_a_service_knows_is_told(service):
    member = await service.join(0)
    service.fill(5)
    await service.client.heartbeat(member, PROGRESS)
    judge = Attendant("1234", "evaluator@host", "evaluator")
    await service.client.attend(judge, Attendance(policy_version=40, state="evaluating"))
    service.clock.now = 3.0
    made = document(await told(service))
    (known,), (node,) = made["agents"], made["nodes"]
    run = made["run_id"], made["environment"], made["uptime_seconds"]
    assert run == ("the-run", SCHEMA.environment, 3.0)
    assert made["buffer"]["size_by_agent"] == {"0": 5}
    assert known["similarity"] == {"0": 1.0, "7": 0.25}
    assert {known[name] for name in ("step", "updates", "episode_return")} == {123, 45, -3.25}
    assert (known["lease"], known["seconds_since_heartbeat"], known["policy_version"]) == ("live", 3.0, None)
    assert (node["role"], node["agent_id"], node["policy_version"]) == ("evaluator", None, 40)
    assert made["troubles"] == []
    assert json.loads(json.dumps(made, allow_nan=False)) == made


async def test_rates_are_of_what_happened_between_the_two_looks(service):
    await service.join(0)
    async with observing(Target(ReplayPlace.at(service.address))) as observer:
        before = await observer.look()
        service.fill(50)
        now = replace(await observer.look(), at=before.at + 2.0)
    made = document(Told(before, now, "r"))
    assert (made["interval_seconds"], made["inserted_per_second"]) == (2.0, 25.0)


async def test_steps_per_second_go_by_when_an_agent_told_its_step(service):
    member = await service.join(0)
    await service.client.heartbeat(member, replace(PROGRESS, step=100))
    async with observing(Target(ReplayPlace.at(service.address))) as observer:
        service.clock.now = 0.4
        before = await observer.look()
        service.clock.now = 0.5
        await service.client.heartbeat(member, replace(PROGRESS, step=150))
        now = replace(await observer.look(), at=before.at + 0.1)
    assert Told(before, now, "r").rates.steps_by_agent == pytest.approx({0: 100.0})


def test_an_agent_that_tells_no_new_step_between_two_looks_counts_with_the_mean_of_the_others():
    before = cluster(4, step=400)
    later = [
        replace(each, progress=replace(each.progress, step=step))
        for each, step in zip(before.agents, (410, 430), strict=False)
    ]
    silent = [replace(each, seconds_since_heartbeat=1.25) for each in before.agents[2:]]
    seen = Told(Look(0.0, before), Look(1.0, replace(before, agents=(*later, *silent))), "r").rates
    assert seen.steps_by_agent == pytest.approx({0: 10.0, 1: 30.0})
    assert seen.env_steps == pytest.approx(80.0)
    ended = tuple(replace(each, lease="left") for each in silent)
    seen = Told(Look(0.0, before), Look(1.0, replace(before, agents=(*later, *ended))), "r").rates
    assert seen.env_steps == pytest.approx(40.0)


def test_what_one_shard_knows_of_an_agent_shows_whichever_was_heard_last():
    first = replace(cluster(1), agents=(agent(0, policy_version=500, silent_s=0.4),))
    second = replace(cluster(1), agents=(agent(0, in_place=True, step=404, silent_s=0.1),))
    for views in ([first, second], [second, first]):
        (known,) = merged(views).agents
        assert (known.policy_version, known.in_place, known.progress.step) == (500, True, 404)
    former = replace(first, agents=(agent(0, policy_version=500, epoch=0, silent_s=0.0),))
    (known,) = merged([former, second]).agents
    assert (known.policy_version, known.progress.step) == (None, 404)


async def test_a_service_that_does_not_answer_is_refused_in_a_sentence():
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1 does not answer: nothing listens"):
        await look_twice(Target(ReplayPlace.at(Address("127.0.0.1", 1)), timeout_s=0.2), apart_s=0.0)


@pytest.mark.slow
async def test_a_shard_that_does_not_answer_is_a_trouble_beside_what_the_other_says(service):
    made = await told(service, apart_s=0.0, others=[Address("127.0.0.1", 1)], timeout_s=1.0)
    (trouble,) = document(made)["troubles"]
    assert trouble.startswith("the replay service at 127.0.0.1:1 does not answer")
    assert made.replays == f"{service.address},127.0.0.1:1"


async def test_two_shards_are_added_up_and_what_is_none_of_them_or_missing_is_said(service):
    async with shards_serving(2) as (first, second):
        for each in (first, second):
            await each.join(0)
        first.fill(5)
        second.fill(7)
        made = document(await told(first, apart_s=0.0, others=[second.address]))
        assert (made["buffer"]["size"], made["buffer"]["capacity"]) == (12, 2_000)
        assert made["buffer"]["size_by_agent"] == {"0": 12}
        assert (len(made["agents"]), made["troubles"]) == (1, [])
        (trouble,) = document(await told(first, apart_s=0.0))["troubles"]
        assert trouble == "these numbers are without shard 1/2: no answer, or not named with --replay"
        made = document(await told(first, apart_s=0.0, others=[service.address, second.address]))
        assert made["buffer"]["size"] == 12
        (trouble,) = made["troubles"]
        assert f"{first.address} and {service.address} are not shards of one replay" in trouble


async def test_a_replay_of_two_names_counts_once(service):
    await service.join(0)
    service.fill(5)
    again = Address("localhost", service.address.port)
    made = document(await told(service, apart_s=0.0, others=[again]))
    assert (made["buffer"]["size"], made["troubles"]) == (5, [])


async def test_what_a_name_leads_to_is_looked_for_again_until_all_shards_are_there(monkeypatch):
    behind: list[Address] = []

    async def resolved(name):
        if not behind:
            raise UnreachableError("the name does not resolve")
        return tuple(behind)

    monkeypatch.setattr("dase_grpc.replay.wire.addresses.resolved", resolved)
    nobody = Address("127.0.0.1", 1)
    async with (
        shards_serving(2) as (first, second),
        observing(Target(ReplayPlace.parse("dns:replay.test:1"), timeout_s=0.2)) as observer,
    ):
        assert (await observer.look()).cluster is None
        behind[:] = [nobody, first.address]
        silent, absent = (await observer.look()).troubles()
        assert "127.0.0.1:1 does not answer" in silent
        assert "without shard 1/2" in absent
        behind[:] = [nobody, second.address, first.address]
        assert (await observer.look()).troubles() == []


@pytest.mark.slow
async def test_an_observer_needs_credentials_where_the_replay_does(tmp_path):
    keyring = make_keyring(tmp_path)
    async with guarded(keyring.folder("replay")) as service:
        observer = keyring.with_certificate("observer")
        made = await look_twice(
            Target(ReplayPlace.at(service.address), observer, timeout_s=PATIENCE_S), apart_s=0.0
        )
        assert made.cluster.run_id == "the-run"
        with pytest.raises(UnauthenticatedError, match="takes TLS only; give this node credentials"):
            await look_twice(Target(ReplayPlace.at(service.address), timeout_s=0.5), apart_s=0.0)


def test_of_one_agent_that_several_shards_know_the_freshest_word_counts():
    stale, fresh = agent(0, silent_s=3.0), agent(0, step=900, silent_s=0.1)
    taken_over = agent(1, epoch=2, silent_s=5.0)
    view = merged([cluster(agents=(stale, taken_over)), cluster(agents=(fresh, agent(1)))])
    assert view.agents == (fresh, taken_over)
    assert view.buffer.incarnations == ("first", "first")


def test_people_get_tables_and_the_similarity_of_each_pair():
    lines = lines_of(of(cluster(2, nodes=(actor(0),))))
    assert lines[0] == "run the-run   replay 127.0.0.1:50051   up 2 min 10 s   Hopper-v5"
    assert "0 inserts/s, 0 samples/s, 0 steps/s (over 1.0 s)" in lines
    assert sum("learner@host-" in line for line in lines) == 2
    assert sum("actor@host-0" in line for line in lines) == 1
    assert [line.split() for line in lines[-2:]] == [["0", "·", "0.01"], ["1", "0.1", "·"]]


def test_pairs_of_many_agents_are_summed_up():
    lines = lines_of(of(cluster(17)))
    assert lines[-1].startswith(
        "similarity λ of 272 pairs: median 1e-09, lowest <1e-09, highest 0.1 (1 from 0)"
    )


def troubled(**changes) -> ClusterView:
    return cluster(agents=(agent(4, **changes),))


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (cluster(draining=True), "the replay is shutting down: it takes no new nodes"),
        (
            troubled(lease="expired", silent_s=130.0),
            "agent 4 is gone: learner@host-4 was last heard of 2 min ago",
        ),
        (troubled(lease="left", reason="failed: RuntimeError: boo"), "agent 4 failed: RuntimeError: boo"),
        (troubled(silent_s=6.0), "agent 4 has been silent for 6.0 s"),
        (troubled(progress=Progress(state="waiting: for 5 more")), "agent 4 waits for 5 more"),
        (cluster(nodes=(actor(2, silent_s=8.0),)), "actor@host-2 of agent 2 has been silent for 8.0 s"),
    ],
)
def test_what_is_wrong_is_said(view, text):
    assert Look(0.0, view).troubles() == [text]
    assert lines_of(of(view))[-1] == f"! {text}"


def test_nothing_is_wrong_with_a_run_that_is_well_is_empty_or_has_ended():
    ended = agent(0, lease="left", reason="finished after 1000 steps", progress=Progress(state="finished"))
    for view in (cluster(), ClusterView(), cluster(agents=(ended,))):
        assert Look(0.0, view).troubles() == []


@pytest.mark.parametrize(("draining", "check", "code"), [(False, True, 0), (True, True, 5), (True, False, 0)])
def test_programs_get_json_and_an_exit_code_only_when_they_ask_for_it(draining, check, code):
    console = Console(file=io.StringIO())
    assert tell(of(cluster(draining=draining)), console, as_json=True, check=check) == code
    assert json.loads(console.file.getvalue())["draining"] is draining


def test_a_page_that_goes_to_a_file_is_not_cut_to_80_columns():
    console = Console(file=io.StringIO())
    tell(of(cluster(8)), console, as_json=False, check=False)
    assert "learner@host-7" in console.file.getvalue()


def test_numbers_that_are_not_finite_are_not_known():
    progress = cluster_pb2.Progress(evaluation_return=nan, similarity={1: inf, 2: 0.5})
    told = cluster_pb2.AgentStatus(seconds_since_heartbeat=nan, progress=progress)
    (seen,) = view_of(cluster_pb2.StatusResponse(agents=[told])).agents
    assert (seen.seconds_since_heartbeat, seen.progress.evaluation_return) == (0.0, None)
    assert seen.progress.similarity == {2: 0.5}


def test_the_page_about_it_names_every_field_and_no_other():
    text = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")
    table = text[text.index("| field | |") :]
    made = document(of(cluster(1, nodes=(actor(0),))))
    fields = {*made, *made["buffer"], *made["agents"][0], *made["nodes"][0]}
    assert set(re.findall(r"`(\w+)`", table)) - {"live", "left", "expired"} == fields


async def test_a_shard_behind_a_name_that_is_silent_is_asked_why_under_that_name(monkeypatch):
    asked = []

    async def require_let_in(_, *service):
        asked.append(service)
        if service[0] == "10.0.0.2":
            raise UnauthenticatedError

    monkeypatch.setattr(Credentials, "require_let_in", require_let_in)
    shards = [Address(host, 50051, server_name="replay.svc") for host in ("10.0.0.1", "10.0.0.2")]
    target = Target(ReplayPlace(tuple(shards)))
    async with Lines(target.replay, target.credentials) as lines:
        with pytest.raises(UnauthenticatedError):
            await Observer(lines, target, tuple(shards)).explain_silence()
    assert asked == [(host, 50051, "replay.svc") for host in ("10.0.0.1", "10.0.0.2")]
