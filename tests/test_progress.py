"""How counts are said."""

import re

from contracts.source import sources

from dase_grpc.progress import several


def test_one_is_said_as_one_and_others_as_several():
    assert several(1, "writer") == "1 writer"
    assert several(0, "writer") == "0 writers"
    assert several(2_000, "writer") == "2,000 writers"
    assert [several(count, "policy", "policies") for count in (1, 2)] == ["1 policy", "2 policies"]


def test_no_sentence_leaves_it_to_its_reader_whether_there_is_one_or_several():
    assert [name for name, text in sources().items() if re.search(r"[a-z]{2}\(s\)[ ;,.]", text)] == []
