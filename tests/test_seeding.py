"""Every random stream of a run comes from its one seed, and no two are alike."""

import json
from itertools import product

import numpy as np
import pytest

from dase_grpc.seeding import Purpose, generator, generator_state, integer, restore_generator, sequence


def test_the_same_name_gives_the_same_stream():
    for purpose in Purpose:
        one, two = (generator(3, purpose, 1, 2).random(8) for _ in range(2))
        assert np.array_equal(one, two)
        assert integer(3, purpose, 1, 2) == integer(3, purpose, 1, 2)


def test_seed_purpose_agent_and_further_keys_each_make_another_stream():
    names = product((0, 1, 2**40), Purpose, (0, 1, 1023), (0, 1))
    drawn = [tuple(sequence(seed, purpose, *key).generate_state(4)) for seed, purpose, *key in names]
    assert len(set(drawn)) == len(drawn)


def test_a_stream_without_a_key_is_none_of_the_agents():
    alone = sequence(0, Purpose.EVALUATION).generate_state(4)
    assert not np.array_equal(alone, sequence(0, Purpose.EVALUATION, 0).generate_state(4))


def test_no_evaluation_seed_ever_meets_a_training_seed():
    evaluating = (Purpose.EVALUATION, Purpose.SCORE)
    training = [purpose for purpose in Purpose if purpose not in evaluating]
    for seed in range(200):
        assert all(integer(seed, purpose) % 2 == 1 for purpose in evaluating)
        assert all(integer(seed, purpose, 0) % 2 == 0 for purpose in training)


def test_integers_are_seeds_that_every_library_takes():
    drawn = [integer(seed, purpose, 1) for seed in range(50) for purpose in Purpose]
    assert all(0 <= value < 2**31 for value in drawn)
    assert max(drawn) > 2**30


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**100])
def test_seeds_of_any_size_are_accepted(seed):
    assert integer(seed, Purpose.NETWORKS, 0) >= 0


def test_the_numbers_of_the_purposes_never_change():
    """They are part of what makes a published seed reproducible: append, never renumber."""
    names = ["NETWORKS", "EXPLORATION", "ENVIRONMENT", "EVALUATION", "SAMPLING", "TARGET_NOISE"]
    names += ["ACTOR_EXPLORATION", "ACTOR_ENVIRONMENT", "SHARDS", "SCORE"]
    assert [(purpose.name, purpose.value) for purpose in Purpose] == [*zip(names, range(10), strict=True)]


def test_known_seeds_stay_as_they_are():
    first = [2044266242, 1976665982, 980756182, 1188727675, 952996942]
    later = [1909843588, 1386216128, 759260342, 1666988960, 1786305061]
    assert [integer(0, purpose, 0) for purpose in Purpose] == first + later


@pytest.mark.parametrize("drawn", [0, 1, 2, 7])
def test_a_generator_goes_on_from_its_state_as_json_keeps_it(drawn):
    one, two = (generator(seed, Purpose.EXPLORATION, 0) for seed in (1, 2))
    one.standard_normal(drawn, np.float32)  # half of a word may be left over
    state = json.loads(json.dumps(generator_state(one)))
    assert all(abs(number) < 2**53 for number in state.values() if isinstance(number, int))
    restore_generator(two, state)
    assert np.array_equal(one.standard_normal(9, np.float32), two.standard_normal(9, np.float32))
    assert np.array_equal(one.integers(10, size=9), two.integers(10, size=9))


def test_a_state_of_another_kind_of_generator_is_refused():
    other = np.random.Generator(np.random.MT19937(0))
    state = generator_state(generator(0, Purpose.SAMPLING))
    with pytest.raises(ValueError, match="MT19937"):
        restore_generator(other, state)
