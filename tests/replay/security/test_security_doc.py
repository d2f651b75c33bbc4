"""docs/security.md says what the code does: its tables and numbers are compared."""

import re
from pathlib import Path

from dase_grpc.replay.security import door, tokens
from dase_grpc.replay.security.certificates import CA_DAYS, NODE_DAYS
from dase_grpc.replay.security.door import PERMISSIONS, SAY_EVERY_S, Denial
from dase_grpc.replay.security.identity import VARIABLES, Role

TEXT = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")


def table(section: str) -> list[list[str]]:
    """The first table of a section, its head included."""
    body = TEXT.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in body.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def test_the_table_of_permissions_is_the_one_of_the_code():
    (_, *roles), *rows = table("Who may do what")
    documented = {
        call: {Role(role) for role, cell in zip(roles, cells, strict=True) if cell == "yes"}
        for call, *cells in rows
    }
    assert documented == {method.rpartition("/")[2]: set(roles) for method, roles in PERMISSIONS.items()}


def test_every_reason_of_the_metric_is_in_the_table():
    reasons = {
        reason for *_, cell in table("What is refused, and how it shows")[1:] for reason in [cell] if cell
    }
    assert reasons == {f"`{reason}`" for reason in Denial}


def test_the_numbers_are_those_of_the_code():
    for sentence, value in (
        (r"valid for (\d+) days", NODE_DAYS),
        (r"the authority for (\d+) \(", CA_DAYS),
        (r"more than (\d+) s from its own clock", tokens.WINDOW_S),
        (r"of (\d+) characters or more", tokens.MIN_SECRET),
        (r"more than (\d+) calls", tokens.MAX_NONCES),
        (r"a call within (\d+) s", door.FAILED_AFTER_S),
        (r"a line per reason every (\d+) s", SAY_EVERY_S),
    ):
        assert [int(found) for found in re.findall(sentence, TEXT)] == [value], sentence
    assert all(f"`{name}`" in TEXT for name in VARIABLES)
