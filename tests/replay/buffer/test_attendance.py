"""The book of nodes that hold no lease."""

import pytest

from dase_grpc.errors import OverloadedError
from dase_grpc.progress import Attendance, Attendant
from dase_grpc.replay.buffer.leases import AttendanceBook

IDLE = Attendance()


def actor(name: str, agent_id: int = 0) -> Attendant:
    return Attendant(f"id-{name}", name, "actor", agent_id)


def names(book: AttendanceBook, now: float) -> list[str]:
    return [seen.node.node_name for seen in book.all(now)]


def test_a_node_is_new_once_and_what_it_said_last_counts():
    book = AttendanceBook(ttl_s=10)
    assert book.note(actor("a"), IDLE, 0.0)
    assert not book.note(actor("a"), Attendance(env_steps=7), 1.0)
    (seen,) = book.all(2.0)
    assert (seen.attendance.env_steps, seen.at) == (7, 1.0)


def test_a_node_that_is_silent_for_longer_than_the_ttl_is_forgotten():
    book = AttendanceBook(ttl_s=10)
    book.note(actor("a"), IDLE, 0.0)
    book.note(actor("b"), IDLE, 5.0)
    assert names(book, 10.0) == ["a", "b"]
    assert names(book, 10.1) == ["b"]
    assert book.note(actor("a"), IDLE, 11.0)


def test_a_node_that_leaves_is_forgotten_at_once_and_may_say_so_twice():
    book = AttendanceBook(ttl_s=10)
    book.note(actor("a"), IDLE, 0.0)
    book.leave("id-a")
    book.leave("id-a")
    assert names(book, 0.0) == []


def test_nodes_are_listed_by_role_agent_and_name():
    book = AttendanceBook(ttl_s=10)
    for node in (actor("c", 1), actor("b", 0), Attendant("e", "z", "evaluator"), actor("a", 1)):
        book.note(node, IDLE, 0.0)
    assert names(book, 0.0) == ["b", "a", "c", "z"]


def test_no_more_nodes_are_taken_than_there_is_room_for_but_silent_ones_make_room():
    book = AttendanceBook(ttl_s=10, max_nodes=2)
    book.note(actor("a"), IDLE, 0.0)
    book.note(actor("b"), IDLE, 8.0)
    with pytest.raises(OverloadedError, match="as are taken, 2, and of one agent"):
        book.note(actor("c"), IDLE, 9.0)
    assert not book.note(actor("a"), IDLE, 9.0)
    assert book.note(actor("c"), IDLE, 18.5)
    assert names(book, 18.5) == ["a", "c"]


def test_one_agent_cannot_keep_the_actors_of_others_out():
    book = AttendanceBook(ttl_s=10, max_nodes=4, max_of_agent=2)
    book.note(actor("a"), IDLE, 0.0)
    book.note(actor("b"), IDLE, 0.0)
    with pytest.raises(OverloadedError, match="of one agent 2"):
        book.note(actor("c"), IDLE, 1.0)
    assert book.note(actor("d", 1), IDLE, 1.0)
    assert book.note(Attendant("e", "z", "evaluator"), IDLE, 1.0)


def test_an_actor_that_fell_silent_counts_as_none_although_nobody_asks_for_the_list():
    book = AttendanceBook(ttl_s=10)
    book.note(actor("a"), IDLE, 0.0)
    book.forget_silent(10.0)
    assert book.has_actor(0)
    book.forget_silent(10.1)
    assert not book.has_actor(0)
