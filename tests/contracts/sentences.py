"""What every message of this project is: one sentence."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_one_sentence(error: BaseException, *parts: str) -> None:
    """The error's text is one readable sentence, and holds each of `parts`."""
    text = str(error)
    assert text == text.strip()
    assert text
    assert "\n" not in text
    assert not text.endswith("."), text
    assert not re.search(r"[.!] [A-Z]", text), text
    assert len(text) <= 300, text
    assert "Error" not in text, text
    for part in parts:
        assert part in text


@contextmanager
def refuses(error: type[BaseException], *parts: str) -> Iterator[None]:
    """The block raises this error, whose text is one sentence that holds each of `parts`."""
    with pytest.raises(error) as caught:
        yield
    assert_one_sentence(caught.value, *parts)
