"""How large a buffer is: a count of transitions, or a size in bytes."""

import pytest
from contracts.sentences import assert_one_sentence
from hypothesis import given, settings
from hypothesis import strategies as st

from dase_grpc.config.texts import transitions

UNITS = {"b": 1, "kb": 10**3, "MB": 10**6, "Gb": 10**9, "tB": 10**12}
UNITS |= {"KiB": 2**10, "mib": 2**20, "GiB": 2**30, "TIB": 2**40}


@pytest.mark.parametrize("unit", UNITS)
@settings(max_examples=30)
@given(number=st.integers(1, 10**12))
def test_a_size_is_exact_in_every_unit(unit, number):
    assert transitions(f"{number}{unit}", row_bytes=1) == number * UNITS[unit]
    assert transitions(f" {number} {unit} ", row_bytes=1) == number * UNITS[unit]


@given(number=st.integers(1, 10**30 - 1), row_bytes=st.integers(1, 10**6))
def test_a_count_does_not_depend_on_the_rows_size(number, row_bytes):
    assert transitions(number, row_bytes=row_bytes) == number
    assert transitions(f"{number}", row_bytes=row_bytes) == number


@given(size=st.integers(1, 10**9), row_bytes=st.integers(1, 10**4))
def test_only_whole_transitions_count(size, row_bytes):
    if size < row_bytes:
        with pytest.raises(ValueError, match="no room for one transition"):
            transitions(f"{size}b", row_bytes=row_bytes)
    else:
        count = transitions(f"{size}b", row_bytes=row_bytes)
        assert count * row_bytes <= size < (count + 1) * row_bytes


@pytest.mark.parametrize(
    ("text", "count"), [("0.5kb", 500), ("1.5KiB", 1536), ("0.3MB", 300_000), ("2.9b", 2)]
)
def test_decimal_fractions_are_exact(text, count):
    assert transitions(text, row_bytes=1) == count


UNREADABLE = """
    b kb k 1k 1ib parsecs 1parsec 1,000 1_000 +5 1e6 1e6b -5kb .5kb 5.kb 0x10 nan inf ² ٣ 1PB 1kbb
"""


@pytest.mark.parametrize(
    "text", [*UNREADABLE.split(), "", "1 000", "9" * 31, "9" * 31 + "b", True, 1.5, None]
)
def test_anything_else_is_refused_and_shows_what_was_given(text):
    with pytest.raises(ValueError, match="neither a number of transitions nor a size") as refusal:
        transitions(text, row_bytes=1)
    assert_one_sentence(refusal.value, '"512MiB"', str(text)[:10])


@pytest.mark.parametrize("capacity", [0, -1, "0", "-7", "0b", "0.9b", "0.0GiB"])
def test_no_room_at_all_is_refused(capacity):
    with pytest.raises(ValueError, match=r"no room for one transition$") as refusal:
        transitions(capacity, row_bytes=1)
    assert_one_sentence(refusal.value, str(capacity))


def test_too_small_a_size_is_refused_with_the_size_of_a_row():
    with pytest.raises(ValueError, match="1kb has no room for one transition of 2048 bytes"):
        transitions("1kb", row_bytes=2048)
