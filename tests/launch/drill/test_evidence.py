"""The check of a drill's buffer takes one that is right and finds each way in which it can be wrong."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from launch.drill.numbered_world import explore

from dase_grpc.launch.drill.evidence import Life, Stored, Tally, problems


@dataclass
class Story:
    """What a drill finds at its end."""

    stored: Stored
    lives: list[Life]
    ledger: list[Tally]
    env: object

    def problems(self):
        return problems(self.stored, self.lives, self.ledger, self.env)

    def with_rows(self, rows, **changes):
        return replace(self, stored=replace(self.stored, rows=rows, **changes))

    def with_life(self, index, **changes):
        lives = list(self.lives)
        lives[index] = replace(lives[index], **changes)
        return replace(self, lives=lives)


@pytest.fixture
def story(tmp_path):
    """Agent 0 was killed after 30 steps, 25 of them acknowledged and 28 stored; its next learner played a
    broken episode of 5 steps again and ended well. Agent 1 had one learner. Transitions are interleaved.
    """
    (first, _, _), (second, _, _) = (explore(tmp_path, steps, agent_id=0) for steps in (30, 45))
    other, env, schema = explore(tmp_path, 50, agent_id=1)
    agent_0 = np.concatenate([first[:28], second[20:]])
    rows = np.concatenate([agent_0[:10], other[:40], agent_0[10:], other[40:]])
    return Story(
        Stored(schema, rows, total=103, capacity=1_000, committed={0: 53, 1: 50}),
        [Life(0, 11, 25, False), Life(0, 12, 20, True), Life(1, 13, 49, True)],
        [Tally(1, 11, 30, 20), Tally(2, 12, 45, 20), Tally(3, 13, 50, 20)],
        env,
    )


def test_it_takes_what_is_right(story):
    assert story.problems() == []


def test_it_takes_a_buffer_that_has_let_go_of_the_oldest(story):
    for kept in (100, 60, 15):
        stored = replace(story.stored, rows=story.stored.rows[-kept:], capacity=kept)
        assert replace(story, stored=stored).problems() == []


def test_it_takes_a_learner_that_stored_nothing(story):
    assert replace(story, lives=[Life(0, 10, 0, False), *story.lives]).problems() == []


def dropped(story, index):
    """Without one transition, which nobody counts either."""
    agent_id = int(story.stored.schema.agent_ids(story.stored.rows)[index])
    committed = {**story.stored.committed, agent_id: story.stored.committed[agent_id] - 1}
    return story.with_rows(
        np.delete(story.stored.rows, index, 0), total=story.stored.total - 1, committed=committed
    )


def swapped(story, one, other):
    order = np.arange(len(story.stored.rows))
    order[[one, other]] = order[[other, one]]
    return story.with_rows(story.stored.rows[order])


def doubled(story, index):
    rows = np.insert(story.stored.rows, index, story.stored.rows[index], 0)
    return story.with_rows(rows, total=104, committed={0: 54, 1: 50})


def torn(story, index, column):
    rows = story.stored.rows.copy()
    rows.view(np.uint32)[index, column] ^= 1
    return story.with_rows(rows)


def given_to(story, index, agent_id):
    rows = story.stored.rows.copy()
    story.stored.schema.agent_ids(rows)[index] = agent_id
    return story.with_rows(rows)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda story: dropped(story, 0), "from number 2 on"),
        (lambda story: dropped(story, 20), "missing, doubled or out of order"),
        (lambda story: dropped(story, 102), "ended well after 50 steps, but 49 is the last"),
        (lambda story: dropped(story, 92), "ended well after 45 steps, but 44 is the last"),
        (lambda story: swapped(story, 20, 21), "missing, doubled or out of order"),
        (lambda story: doubled(story, 20), "missing, doubled or out of order"),
        (lambda story: torn(story, 20, 0), "not whole"),
        (lambda story: torn(story, 20, 4), "not whole"),
        (lambda story: torn(story, 20, 9), "not whole"),
        (lambda story: given_to(story, 20, 0), "agent 1"),
        (lambda story: given_to(story, 20, 7), "agents [7], who never joined"),
        (lambda story: story.with_rows(story.stored.rows, total=104), "the learners committed 103"),
        (lambda story: story.with_rows(story.stored.rows[:-1]), "102 transitions are there, not 103"),
        (lambda story: story.with_life(0, acknowledged=29), "29 transitions of process 11 were acknowledged"),
        (lambda story: story.with_life(2, acknowledged=51), "51 transitions of process 13 were acknowledged"),
        (lambda story: story.with_life(0, ended_well=True), "ended well after 30 steps, but 28 is the last"),
        (lambda story: story.with_life(2, pid=99), "process 13, which was no learner of its"),
        (lambda story: replace(story, ledger=story.ledger[:2]), "mixed up"),
        (lambda story: replace(story, ledger=[Tally(1, 11, 27, 20), *story.ledger[1:]]), "took 27 steps"),
        (
            lambda story: replace(story, lives=[*story.lives, Life(1, 77, 3, False)]),
            "nothing is there of the 3 acknowledged transitions of 77",
        ),
    ],
)
def test_it_finds_what_is_wrong(story, wrong, says):
    found = wrong(story).problems()
    assert any(says in problem for problem in found), found
