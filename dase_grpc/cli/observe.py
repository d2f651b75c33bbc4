"""The `dase status` and `dase top` commands: parse, call, print. No logic."""

from pathlib import Path
from typing import Annotated

import typer

from dase_grpc.cli import flags
from dase_grpc.nodes.options import DEFAULT_ADDRESS
from dase_grpc.replay.security.identity import TOKEN_FILE_VARIABLE

Replays = Annotated[
    str,
    flags.option(
        "--replay",
        f"As for nodes: the replay's address, else {DEFAULT_ADDRESS}, or those of its shards.",
        metavar="HOST:PORT[,...]",
    ),
]
TokenFile = Annotated[
    Path | None,
    flags.option(
        "--token-file",
        "A token to show, with a --tls folder that needs ca.crt only.",
        envvar=TOKEN_FILE_VARIABLE,
        metavar="FILE",
    ),
]
Timeout = Annotated[
    float, flags.option("--timeout", "How long a replay is given to answer.", min=0.1, metavar="SECONDS")
]


def status(
    *,
    replay: Replays = DEFAULT_ADDRESS,
    as_json: flags.AsJson = False,
    check: Annotated[
        bool, flags.option("--check", "Exit with 5 where something is wrong with the cluster.")
    ] = False,
    tls: flags.Tls = None,
    token_file: TokenFile = None,
    timeout: Timeout = 5.0,
) -> None:
    """Prints how a running cluster is: agents, other nodes, buffer, rates, similarities.

    Looks twice, a second apart, for the rates. Exits with 0 where a replay answered, with 1 where none did,
    with 3 where it refused.
    """
    from rich.console import Console

    from dase_grpc.observe.once import status_here
    from dase_grpc.observe.view import Target

    target = Target.parse(replay=replay, tls=tls, token_file=token_file, timeout_s=timeout)
    raise typer.Exit(status_here(target, Console(), as_json=as_json, check=check))


def top(
    *,
    replay: Replays = DEFAULT_ADDRESS,
    tls: flags.Tls = None,
    token_file: TokenFile = None,
    timeout: Timeout = 2.0,
) -> None:
    """Shows a running cluster in this terminal, anew every second; q ends it.

    Where the replay is away it says so, and goes on when it is back.
    """
    from rich.console import Console

    from dase_grpc.observe.top import top_here
    from dase_grpc.observe.view import Target

    top_here(Target.parse(replay=replay, tls=tls, token_file=token_file, timeout_s=timeout), Console())
