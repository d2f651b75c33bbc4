"""PolicyBoard: versions grow, a policy is replaced whole or not at all, and memory is bounded."""

import hashlib

import pytest
from contracts.sentences import assert_one_sentence, refuses

from dase_grpc.errors import MalformedError, StalePolicyError
from dase_grpc.replay.buffer.policies import MAX_POLICY_BYTES, IncomingPolicy, PolicyBoard, PolicyBytes


@pytest.fixture
def board() -> PolicyBoard:
    return PolicyBoard()


def policy(
    version: int, payload: bytes | None = None, *, agent_id: int = 0, epoch: int = 1, step: int = 0
) -> PolicyBytes:
    payload = b"policy %d" % version if payload is None else payload
    return PolicyBytes.of(payload, agent_id=agent_id, epoch=epoch, version=version, step=step)


def arriving(board: PolicyBoard, announced: PolicyBytes):
    """The policy's place on the board, announced truly."""
    said = {name: getattr(announced, name) for name in ("agent_id", "epoch", "version", "sha256")}
    return board.arriving(IncomingPolicy(size=len(announced.payload), **said))


def incoming(payload: bytes = b"0123456789", **changes: object) -> IncomingPolicy:
    right = {"size": len(payload), "sha256": hashlib.sha256(payload).digest()}
    return IncomingPolicy(**{"agent_id": 3, "epoch": 1, "version": 7, **right, **changes})


def test_before_any_policy_the_board_is_empty(board):
    assert (board.agents(), board.latest(0), board.versions) == ([], None, {})


def test_the_latest_policy_of_each_agent_is_kept(board):
    for each in (policy(1), policy(5), policy(2, agent_id=9)):
        assert board.publish(each)
    assert (board.latest(0), board.latest(9), board.latest(1)) == (policy(5), policy(2, agent_id=9), None)
    assert (board.agents(), board.versions) == ([0, 9], {0: 5, 9: 2})


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (policy(4), ("policy 4 of agent 0", "a newer one, version 5 (epoch 1)")),
        (policy(5, b"different"), ("policy 5 of agent 0", "another one, version 5")),
        (policy(5, b"different", step=1_000), ("policy 5 of agent 0", "another one, version 5")),
    ],
    ids=["older", "another of the same version", "another at a later step"],
)
def test_an_older_or_another_policy_is_refused_and_changes_nothing(board, other, parts):
    board.publish(policy(5))
    with refuses(StalePolicyError, *parts):
        board.publish(other)
    assert board.latest(0) == policy(5)


def test_the_very_same_policy_again_changes_nothing(board):
    first = policy(5)
    assert board.publish(first)
    assert not board.publish(policy(5))
    assert board.latest(0) is first


def test_a_later_epoch_may_begin_at_any_version_and_ends_the_one_before(board):
    board.publish(policy(5_000))
    assert board.publish(policy(1, epoch=2))
    with pytest.raises(StalePolicyError, match=r"version 1 \(epoch 2\)"):
        board.publish(policy(6_000))
    assert board.latest(0) == policy(1, epoch=2)


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_pieces_become_the_policy_they_were_cut_from(board, cut):
    whole = policy(7, b"0123456789")
    with arriving(board, whole) as arrived:
        for start in range(0, 10, cut):
            assert (arrived.whole, board.incoming_bytes) == (False, start)
            arrived.add(whole.payload[start : start + cut])
        assert arrived.whole
        assert arrived.finish() == whole
    assert board.latest(0) is None


def test_a_policy_that_ends_too_early_is_refused_with_both_sizes():
    arrived = incoming()
    arrived.add(b"0123")
    with pytest.raises(MalformedError) as refusal:
        arrived.finish()
    assert_one_sentence(refusal.value, "after 4 of 10 bytes")


@pytest.mark.parametrize("more", [b"", b"4567890"], ids=["nothing", "too much"])
def test_a_piece_has_a_byte_and_none_too_many(more):
    arrived = incoming()
    arrived.add(b"0123")
    with refuses(MalformedError, f"with 10 bytes got {len(more)} more after 4"):
        arrived.add(more)
    assert arrived.held_bytes == 4


def test_bytes_of_another_digest_are_refused_naming_the_policy():
    arrived = incoming()
    arrived.add(b"012345678X")
    with pytest.raises(MalformedError) as refusal:
        arrived.finish()
    assert_one_sentence(refusal.value, "agent 3's policy 7", "SHA-256")


@pytest.mark.parametrize("size", [0, MAX_POLICY_BYTES + 1, 2**64 - 1])
def test_a_policy_that_is_empty_or_too_large_is_refused_before_a_byte_of_it_is_taken(size):
    with refuses(MalformedError, f"1 to {MAX_POLICY_BYTES} bytes, not {size}"):
        incoming(size=size)


def test_the_largest_policy_takes_no_memory_before_it_comes():
    assert incoming(size=MAX_POLICY_BYTES).held_bytes == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        *(({"sha256": bytes(length)}, f"32 bytes, not {length}") for length in (0, 31, 33)),
        *(({"version": number}, f"version {number} is outside") for number in (2**63, 2**64 - 1, -1)),
        *(({"step": number}, f"step {number} of") for number in (2**63, -1)),
    ],
)
def test_a_digest_of_another_length_and_numbers_beyond_63_bits_are_refused(changes, sentence):
    incoming(version=2**63 - 1, step=2**63 - 1)
    with pytest.raises(MalformedError, match=sentence):
        incoming(**changes)


def test_what_was_announced_is_refused_at_once_if_it_is_too_old(board):
    board.publish(policy(5))
    for old in (policy(4), policy(5, b"different")):
        with pytest.raises(StalePolicyError), arriving(board, old):
            pytest.fail("it was let in")
    with arriving(board, policy(5)) as again:
        again.add(policy(5).payload)
        assert not board.publish(again.finish())


def test_an_unfinished_policy_is_dropped_with_its_stream(board):
    broken = policy(7)
    board.publish(policy(5))

    def break_off() -> None:
        with arriving(board, broken) as arrived:
            arrived.add(b"poli")
            assert board.incoming_bytes == 4
            raise ConnectionError

    with pytest.raises(ConnectionError):
        break_off()
    assert (board.incoming_bytes, board.latest(0)) == (0, policy(5))


def test_a_second_stream_of_an_agent_takes_the_first_ones_place(board):
    whole = policy(7)
    with arriving(board, whole) as first:
        first.add(b"pol")
        with arriving(board, whole) as second, arriving(board, policy(1, agent_id=1)) as of_another:
            of_another.add(b"p")
            assert board.incoming_bytes == 1
            for call in (lambda: first.add(b"icy"), first.finish):
                with refuses(StalePolicyError, "policy 7 of agent 0", "another Publish stream"):
                    call()
            second.add(whole.payload)
            assert board.publish(second.finish())
    assert (board.latest(0), board.incoming_bytes) == (whole, 0)


def test_a_stream_that_is_refused_leaves_the_one_that_is_arriving_alone(board):
    board.publish(policy(5))
    with arriving(board, policy(7)) as first:
        first.add(b"pol")
        with pytest.raises(StalePolicyError), arriving(board, policy(4)):
            pytest.fail("it was let in")
        first.add(b"icy 7")
        assert board.publish(first.finish())


def test_versions_are_compared_again_when_the_policy_is_whole(board):
    with arriving(board, policy(6)) as slow:
        slow.add(policy(6).payload)
        board.publish(policy(8))
        with pytest.raises(StalePolicyError):
            board.publish(slow.finish())
    assert board.latest(0) == policy(8)


def test_the_same_policy_at_a_later_step_is_newer(board):
    assert board.publish(policy(0, step=0))
    assert board.versions == {0: 0}
    assert board.publish(policy(0, step=1_000))
    assert not board.publish(policy(0, step=1_000))
    assert not board.publish(policy(0, step=500))
    assert board.latest(0).step == 1_000


def test_who_wants_all_follows_each_agent_and_nobody_is_counted_beyond_the_block(board):
    with board.following([]), board.following([1, 2]), board.following([2]):
        assert [board.followers(agent_id) for agent_id in (0, 1, 2)] == [1, 2, 3]
    assert [board.followers(agent_id) for agent_id in (0, 1, 2)] == [0, 0, 0]
