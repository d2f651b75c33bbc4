"""LeaseTable: one live node for each agent id, and no way back for a stale one."""

import pytest
from contracts.sentences import assert_one_sentence, refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from dase_grpc.errors import AgentTakenError, DaseError, MalformedError, StaleLeaseError
from dase_grpc.progress import Progress
from dase_grpc.replay.buffer.leases import LeaseTable

TTL_S = 10.0


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable(ttl_s=TTL_S, max_agents=3)


def test_nodes_that_ask_for_nothing_get_the_lowest_free_ids(table):
    assert [table.join(f"n{index}", None, 0.0).agent_id for index in range(3)] == [0, 1, 2]


def test_an_id_that_was_given_back_is_the_next_to_be_leased(table):
    for index in range(3):
        table.join(f"n{index}", None, 0.0)
    table.leave(1, 1, because="done")
    lease = table.join("late", None, 1.0)
    assert (lease.agent_id, lease.epoch, lease.node_name) == (1, 2, "late")


def test_an_id_asked_for_is_leased_even_if_lower_ones_are_free(table):
    assert table.join("n", 2, 0.0).agent_id == 2
    assert table.join("m", None, 0.0).agent_id == 0


def test_a_live_duplicate_is_refused_and_told_who_holds_the_id(table):
    table.join("first", 1, 0.0)
    with refuses(AgentTakenError, "agent 1", "'first'", "10 s"):
        table.join("second", 1, 5.0)
    assert table.all()[0].node_name == "first"


def test_a_lease_lives_up_to_and_with_its_last_moment(table):
    lease = table.join("first", 0, 100.0)
    assert lease.state(100.0 + TTL_S) == "live"
    with pytest.raises(AgentTakenError):
        table.join("second", 0, 100.0 + TTL_S)
    assert lease.state(100.0 + TTL_S + 1e-6) == "expired"
    assert table.join("second", 0, 100.0 + TTL_S + 1e-6).epoch == 2


def test_a_heartbeat_extends_a_lease_and_keeps_the_progress(table):
    table.join("first", 0, 0.0)
    table.renew(0, 1, 9.0, progress=Progress(step=7))
    with pytest.raises(AgentTakenError):
        table.join("second", 0, 19.0)
    assert table.all()[0].progress.step == 7
    assert table.all()[0].state(19.1) == "expired"


def test_a_silent_holder_may_renew_as_long_as_nobody_took_its_id(table):
    table.join("first", 0, 0.0)
    table.renew(0, 1, 50.0, progress=Progress())
    assert table.all()[0].state(60.0) == "live"


def test_a_silent_holder_whose_id_was_taken_is_fenced_off(table):
    table.join("first", 0, 0.0)
    table.join("second", 0, 50.0)
    for act in (
        lambda: table.renew(0, 1, 50.0, progress=Progress()),
        lambda: table.leave(0, 1, because="done"),
        lambda: table.require(0, 1),
    ):
        with refuses(
            StaleLeaseError, "agent 0", "epoch 1", "epoch 2", "'second'", "so end, or join as another agent"
        ):
            act()
    assert table.require(0, 2).node_name == "second"


def test_a_lease_that_was_given_back_is_not_valid_and_says_why(table):
    table.join("first", 0, 0.0)
    table.leave(0, 1, because="budget spent")
    with refuses(StaleLeaseError, "gave epoch 1 back", "budget spent", "; join again"):
        table.require(0, 1)
    assert table.all()[0].state(0.0) == "left"


def test_a_lease_that_never_was_is_not_valid(table):
    with refuses(StaleLeaseError, "agent 2", "no lease", "; join again"):
        table.require(2, 1)


def test_a_node_that_asks_again_because_it_heard_no_answer_is_given_its_lease(table):
    first = table.join("n", None, 0.0, node_id="a")
    again = table.join("n", None, 8.0, node_id="a")
    assert (again.agent_id, again.epoch, again.renewed_at) == (first.agent_id, first.epoch, 8.0)
    assert table.join("n", 0, 15.0, node_id="a").epoch == first.epoch
    assert [lease.agent_id for lease in table.all()] == [0]
    assert table.join("n", 1, 15.0, node_id="a").agent_id == 1  # which it did not have


@pytest.mark.parametrize(("holder", "other"), [("a", "b"), ("a", ""), ("", ""), ("", "a")])
def test_another_node_or_one_without_an_id_is_not_given_a_live_lease(table, holder, other):
    table.join("n", 0, 0.0, node_id=holder)
    with pytest.raises(AgentTakenError):
        table.join("n", 0, 1.0, node_id=other)
    assert table.join("n", None, 1.0, node_id=other).agent_id == 1


def test_a_lease_that_has_ended_or_was_given_back_is_leased_anew_to_the_same_node(table):
    table.join("n", 0, 0.0, node_id="a")
    assert table.join("n", 0, 50.0, node_id="a").epoch == 2
    table.leave(0, 2, because="done")
    assert table.join("n", 0, 50.0, node_id="a").epoch == 3


def test_the_lease_of_a_node_that_has_ended_is_leased_at_once_and_its_epoch_fenced_off(table):
    table.join("n", 0, 0.0, node_id="dead")
    lease = table.join("n", 0, 1.0, node_id="next", ended="dead")
    assert (lease.epoch, lease.node_id, lease.renewed_at) == (2, "next", 1.0)
    with refuses(StaleLeaseError, "agent 0", "epoch 1", "epoch 2"):
        table.require(0, 1)
    again = table.join("n", 0, 2.0, node_id="next", ended="dead")  # whose answer was lost
    assert again.epoch == 2


@pytest.mark.parametrize("claimed", ["before", "other", "", "livin", "living2", "liv\u00efng"])
def test_a_wrong_claim_that_the_holder_has_ended_changes_nothing(table, claimed):
    table.join("n", 0, 0.0, node_id="before")
    table.join("n", 0, 1.0, node_id="living", ended="before")
    table.renew(0, 2, 2.0, progress=Progress(step=7))
    held = table.all()
    with refuses(AgentTakenError, "agent 0", "'n'"):
        table.join("m", 0, 3.0, node_id="third", ended=claimed)
    assert table.all() == held
    table.renew(0, 2, 4.0, progress=Progress(step=8))
    assert table.require(0, 2).progress.step == 8


def test_a_claim_says_nothing_of_a_node_without_an_id_of_other_agents_and_of_the_next_free_id(table):
    table.join("n", 0, 0.0)
    with pytest.raises(AgentTakenError):
        table.join("m", 0, 1.0, ended="")
    table.join("n", 1, 0.0, node_id="dead")
    with pytest.raises(AgentTakenError):
        table.join("m", 0, 1.0, ended="dead")
    assert table.join("m", None, 1.0, node_id="m", ended="dead").agent_id == 2
    assert [lease.epoch for lease in table.all()] == [1, 1, 1]


def test_epochs_of_one_id_only_grow(table):
    epochs = []
    for turn in range(4):
        lease = table.join("n", 0, float(turn))
        table.leave(0, lease.epoch, because="done")
        epochs.append(lease.epoch)
    assert epochs == [1, 2, 3, 4]


def test_when_every_id_is_held_nobody_else_joins(table):
    for _ in range(3):
        table.join("n", None, 0.0)
    with pytest.raises(AgentTakenError) as refusal:
        table.join("m", None, 0.0)
    assert_one_sentence(refusal.value, "all 3 agent ids")


@pytest.mark.parametrize("agent_id", [-1, 3, 2**32 - 1])
def test_an_id_that_does_not_exist_is_malformed_and_not_taken(table, agent_id):
    with refuses(MalformedError, str(agent_id), "0..2"):
        table.join("n", agent_id, 0.0)
    assert table.all() == []


def test_leases_are_listed_by_agent_id(table):
    for agent_id in (2, 0, 1):
        table.join("n", agent_id, 0.0)
    assert [lease.agent_id for lease in table.all()] == [0, 1, 2]


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "renew", "leave"]),
            st.integers(0, 2),
            st.integers(1, 4),
            st.sampled_from([0.0, 1.0, 9.0, 11.0]),
        ),
        max_size=30,
    )
)
@pytest.mark.slow
def test_whatever_happens_an_id_has_one_valid_epoch_and_it_never_falls(events):
    table, now, latest = LeaseTable(ttl_s=TTL_S, max_agents=3), 0.0, {}
    for act, agent_id, epoch, passed in events:
        now += passed
        held = {lease.agent_id: lease for lease in table.all()}
        live = agent_id in held and held[agent_id].state(now) == "live"
        try:
            if act == "join":
                latest[agent_id] = table.join("n", agent_id, now).epoch
                assert not live
                assert latest[agent_id] == (held[agent_id].epoch + 1 if agent_id in held else 1)
            elif act == "renew":
                table.renew(agent_id, epoch, now, progress=Progress())
                assert epoch == latest[agent_id]
            else:
                table.leave(agent_id, epoch, because="done")
                assert epoch == latest[agent_id]
        except DaseError:
            left = agent_id in held and held[agent_id].state(now) == "left"
            assert live if act == "join" else left or epoch != latest.get(agent_id)
        assert {lease.agent_id: lease.epoch for lease in table.all()} == latest
