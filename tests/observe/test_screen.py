"""What `dase top` draws, at the sizes that terminals have."""

import re
from dataclasses import replace

import pytest
from observe.clusters import actor, agent, buffer, cluster, looks, printed

from dase_grpc.errors import UnreachableError
from dase_grpc.observe.top import Screen
from dase_grpc.observe.view import ClusterView, Look, NodeView
from dase_grpc.progress import Attendance, Progress

REPLAY = "127.0.0.1:50051"
SIZES = [(80, 24), (160, 50)]


def shown(seen: list[Look], *, size: tuple[int, int] = (80, 24), now: float = 9.0) -> list[str]:
    known = next((look for look in reversed(seen) if look.cluster is not None), None)
    width, height = size
    return printed(Screen(REPLAY, seen, now, known).drawn(width=width, height=height), width=width)


def seen(view: ClusterView) -> list[Look]:
    return [Look(0.0, view), Look(1.0, view)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("agents", [0, 1, 2, 8, 16, 17, 64])
@pytest.mark.parametrize("nodes", [0, 1, 40])
def test_every_screen_fits_the_terminal(size, agents, nodes):
    lines = shown(looks(agents=agents, nodes=tuple(map(actor, range(nodes)))), size=size)
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("agents", [1, 2, 8])
def test_every_agent_has_a_line_with_its_numbers(size, agents):
    lines = shown(looks(agents=agents), size=size)
    for agent_id in range(agents):
        (row,) = [line for line in lines if re.match(rf" +{agent_id}  .*training", line)]
        assert re.search(r"490 +49% .* 91 +-3.2 +-2.0 +0.05 ", row)


def test_the_head_says_which_run_this_is_and_how_fast_it_is():
    text = "\n".join(shown(looks(agents=2)))
    assert "run the-run   replay 127.0.0.1:50051   up 2 min 10 s   Hopper-v5" in text
    assert "2 agents: 2 live   in the buffer 0:50%  1:50%" in text
    assert "buffer 2,000 of 100,000 (2%)   inserted 3,180  sampled 814,080  refused 0" in text
    assert re.search(r"inserts/s +20 +█{9}\nsamples/s +5,120 +█{9}\nsteps/s +20 +█{9}\n", text)


def test_the_three_rates_share_a_line_where_there_is_room_for_one_only_or_in_one():
    for lines in (shown(looks(agents=8)), shown(looks(agents=2), size=(160, 50))):
        (line,) = [line for line in lines if "samples/s" in line]
        assert re.search(r"inserts/s +\d+ +█+ +samples/s +[\d,]+ +█+ +steps/s +\d+ +█+$", line)


def test_a_wide_terminal_shows_more_of_each_agent_and_the_similarities_beside_them():
    lines = shown(looks(agents=8), size=(160, 50))
    (titles,) = [line for line in lines if line.startswith("agent")]
    assert titles.startswith("agent  lease  heard")
    assert titles.endswith("similarity λ, row learns from column")


def test_a_narrow_terminal_shows_the_similarities_below_where_there_is_room():
    lines = shown(looks(agents=3))
    first = lines.index("similarity λ, row learns from column")
    assert lines[first + 1].split() == ["0", "1", "2"]
    assert lines[first + 2].split() == ["0", "·", "0.01", "0.001"]
    assert lines[first + 4].split() == ["2", "0.1", "0.01", "·"]


@pytest.mark.parametrize(
    ("agents", "size"), [(16, (80, 24)), (64, (80, 24)), (64, (160, 50)), (17, (160, 50))]
)
def test_similarities_that_do_not_fit_are_summed_up_in_a_line(agents, size):
    (line,) = [line for line in shown(looks(agents=agents), size=size) if "similarity" in line]
    assert line.startswith(f"similarity λ of {agents * (agents - 1):,} pairs: median ")


def test_sixteen_agents_have_a_heat_map_of_powers_of_ten_on_a_tall_terminal_of_80_columns():
    lines = shown(looks(agents=16), size=(80, 60))
    row = lines[lines.index("similarity λ, row learns from column") + 2]
    assert " ".join(row.split()) == "0 · .01 e-3 e-4 e-5 e-6 e-7 e-8 e-9 ~0 ~0 ~0 ~0 ~0 ~0 ~0"


def test_agents_that_do_not_fit_are_counted_and_those_in_trouble_come_first():
    gone = replace(agent(63, of=64), lease="expired", seconds_since_heartbeat=25.0)
    lines = shown(seen(cluster(64, agents=(*cluster(64).agents[:63], gone))))
    titles = next(index for index, line in enumerate(lines) if line.startswith("agent"))
    assert re.match(r" +63 .* silent$", lines[titles + 1])
    assert re.match(r" +0 .* training$", lines[titles + 2])
    (rest,) = [line for line in lines if line.startswith("... and")]
    assert re.fullmatch(r"\.\.\. and \d+ more: \d+ live", rest)
    assert "64 agents: 63 live, 1 expired" in lines


def test_a_lease_that_has_expired_is_said():
    gone = replace(agent(1), lease="expired", seconds_since_heartbeat=25.0)
    lines = shown(seen(cluster(agents=(agent(0), gone))))
    assert "! agent 1 is gone: learner@host-1 was last heard of 25 s ago" in lines


def test_what_agents_and_other_nodes_wait_for_is_said_in_full():
    waits = replace(agent(0).progress, state="waiting: 25,000 more transitions, 3 of 25,003 are there")
    starved = actor(0, attendance=Attendance(state="waiting: a policy of agent 0"))
    lines = shown(seen(cluster(agents=(agent(0, progress=waits), agent(1)), nodes=(starved,))))
    assert "! agent 0 waits for 25,000 more transitions, 3 of 25,003 are there" in lines
    assert "! actor@host-0 of agent 0 waits for a policy of agent 0" in lines


def test_an_evaluator_without_a_policy_to_evaluate_is_no_trouble():
    idle = NodeView("evaluator", "evaluator@host", attendance=Attendance(state="idle: no policy is due"))
    assert not Look(0.0, cluster(agents=(agent(0),), nodes=(idle,))).troubles()


def test_more_troubles_than_there_is_room_for_are_counted():
    gone = [replace(agent(each, of=30), lease="expired", seconds_since_heartbeat=9.0) for each in range(30)]
    lines = [line for line in shown(seen(cluster(30, agents=tuple(gone)))) if line.startswith("! ")]
    assert len(lines) == 5
    assert lines[-1] == "! ... and 26 more of the kind"


def test_actors_and_evaluators_are_shown():
    judge = NodeView("evaluator", "evaluator@host", attendance=Attendance(state="evaluating"))
    lines = shown(looks(agents=1, nodes=(actor(0), judge)))
    assert any(re.match(r"actor +0 +4 +56 +280 +20 +exploring +actor@host-0", line) for line in lines)
    assert any(re.match(r"evaluator +all +- +- +- +- +evaluating +evaluator@host", line) for line in lines)
    assert lines[1].startswith("1 agent: 1 live; 1 actor; 1 evaluator")


def test_nothing_is_told_before_a_learner_has_joined():
    lines = shown(seen(ClusterView(run_id="the-run")))
    assert lines[0].startswith("run the-run   replay 127.0.0.1:50051   no learner has joined yet")
    assert "buffer not open yet" in lines


def test_numbers_that_are_not_known_are_dashes():
    new = agent(0, progress=Progress())
    (row,) = [line for line in shown(seen(cluster(1, agents=(new,)))) if "starting" in line]
    assert row.split() == ["0", "-", "-", "-", "-", "-", "starting"]
    assert "inserts/s       0" in "\n".join(shown(seen(cluster(1))))
    assert "inserts/s       -" in "\n".join(shown([Look(0.0, cluster(1))]))


@pytest.mark.parametrize("size", SIZES)
def test_a_very_long_name_of_an_environment_is_cut_off(size):
    first, *others = shown(looks(environment="e" * 500), size=size)
    assert first.startswith("run the-run   replay 127.0.0.1:50051   up 2 min 10 s   eeee")
    assert first.endswith("…  q quits")
    assert others


def test_a_name_is_not_taken_for_markup():
    assert "[bold]x" in shown(looks(environment="[bold]x[/bold]"))[0]


def test_a_replay_that_is_away_is_said_and_what_is_known_stays():
    lost = Look(12.0, None, {REPLAY: UnreachableError(f"the replay service at {REPLAY} does not answer")})
    lines = shown([*looks(), lost], now=12.5)
    assert f"! the replay service at {REPLAY} does not answer" in lines
    assert "! what is below was so 3.5 s ago; waiting for the replay" in lines
    assert any(line.endswith("training") for line in lines)
    assert "inserts/s       -" in "\n".join(lines)


def test_rates_are_known_again_soon_after_a_replay_has_come_back():
    back = [Look(float(at), view.cluster) for at, view in enumerate(looks(count=2), start=20)]
    text = "\n".join(shown([*looks(), Look(12.0, None, {REPLAY: UnreachableError("away")}), *back]))
    assert "! away" not in text
    assert re.search(r"inserts/s +20 ", text)


def test_a_replay_that_never_answered_is_said():
    lost = Look(2.0, None, {REPLAY: UnreachableError("it does not answer")})
    lines = shown([lost])
    assert lines[0].startswith("dase top   replay 127.0.0.1:50051   no replay has answered yet")
    assert "! it does not answer" in lines


def test_a_shard_that_is_silent_is_said_beside_what_the_others_say():
    half = Look(9.0, cluster(), {"shard-1:50051": UnreachableError("shard-1:50051 does not answer")})
    lines = shown([*looks(), half])
    assert "! shard-1:50051 does not answer" in lines
    assert not [line for line in lines if "waiting for the replay" in line]


def test_a_buffer_that_was_emptied_has_no_rates_below_0():
    emptied = cluster(buffer=buffer(2, inserted=5, incarnations=("second",)))
    assert "inserts/s       -" in "\n".join(shown([Look(0.0, cluster()), Look(1.0, emptied)]))


def test_a_screen_takes_the_size_that_the_terminal_has():
    screen = Screen(REPLAY, looks(agents=8), 9.0, looks(agents=8)[-1])
    assert "lease" in "\n".join(printed(screen, width=160, height=50))
    assert "lease" not in "\n".join(printed(screen, width=80, height=24))
