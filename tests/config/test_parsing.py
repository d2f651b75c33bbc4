"""Whatever stands in a TOML or JSON text, it is read or refused in one sentence."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence

from dase_grpc.config.resolve import read_toml
from dase_grpc.config.texts import finite_json, json_value, leaves, toml_file, toml_tables, with_infinite
from dase_grpc.launch.experiments.file import read_experiment

DEEP = 100_000

TEXT = '[set]\nenv = "Pendulum-v1"\n[matrix]\nseed = [0, 1]\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * DEEP, "nested too deeply"),
        ("a = " + "{a=" * DEEP, "nested too deeply"),
        ("a = " + "9" * 5_000, "more than 64 bits"),
        ("a = [{b = 0x" + "f" * 17 + "}]", "more than 64 bits"),
        ("a = -0", None),
        (f"a = [{2**63 - 1}, {-(2**63)}]", None),
        (f"a = {2**63}", "more than 64 bits"),
    ],
)
def test_toml_is_read_or_refused(text: str, words: str | None) -> None:
    if words is None:
        assert list(toml_tables(text)) == ["a"]
    else:
        with pytest.raises(ValueError, match=words) as refused:
            toml_tables(text)
        assert_one_sentence(refused.value)


@pytest.mark.parametrize("text", ["[" * DEEP, '{"a":' * DEEP, "[", ""])
def test_json_is_read_or_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting"):
        json_value(text)
    assert json_value('{"a": [1]}') == {"a": [1]}


def test_leaves_are_keys_and_values_however_deep() -> None:
    assert list(leaves({"a": [1, {"b": (2.5, "c")}], "d": {}})) == ["a", 1, "b", 2.5, "c", "d"]


@pytest.mark.parametrize("read", [toml_file, read_toml, read_experiment])
def test_a_toml_file_is_the_same_as_an_editor_on_windows_saves_it(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    file = tmp_path / "same.toml"
    file.write_bytes(TEXT.encode())
    as_it_was = read(file)
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert read(file) == as_it_was


def test_a_toml_file_of_another_encoding_is_told_from_a_mistake_in_it(tmp_path: Path) -> None:
    file = tmp_path / "utf16.toml"
    file.write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(ValueError, match=r"not UTF-8 text .*save it as UTF-8") as refused:
        toml_file(file)
    assert_one_sentence(refused.value)


def test_infinite_numbers_pass_through_json_that_has_none():
    value = {"range": [0.7, math.inf], "deeper": [{"low": -math.inf, "float": "inf or so", "whole": 3}]}
    text = json.dumps(finite_json(value), allow_nan=False)
    assert with_infinite(json_value(text)) == value
