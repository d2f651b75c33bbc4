"""The `dase certs` commands: parse, call, print. No logic."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from dase_grpc.cli.flags import option
from dase_grpc.replay.security.identity import Identity

app = typer.Typer(
    help="Makes certificates and tokens for nodes: a development authority of your own (docs/security.md).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The authority's folder.")]
RoleOf = Annotated[str, option("--role", "replay, learner, actor, evaluator, observer or client.")]
AgentOf = Annotated[
    int | None, option("--agent", "The only agent that a learner or actor acts as; else any.", min=0)
]
Replace = Annotated[bool, option("--replace", "Replace what is there; running nodes take it into use.")]


@app.command()
def init(
    directory: Directory,
    *,
    days: Annotated[int, option("--days", "How long it is valid; else 365.", min=1)] = 365,
) -> None:
    """Makes an authority: DIR/ca.crt for every node, DIR/ca.key for nobody but you."""
    from dase_grpc.replay.security.certificates import make_authority

    typer.echo(make_authority(directory, now=datetime.now(UTC), days=days))


@app.command()
def issue(
    directory: Directory,
    *,
    role: RoleOf,
    agent: AgentOf = None,
    host: Annotated[
        list[str] | None,
        option("--host", "A name or address by which a replay is reached; may be repeated.", metavar="NAME"),
    ] = None,
    days: Annotated[int, option("--days", "How long it is valid; else 30.", min=1)] = 30,
    replace: Replace = False,
) -> None:
    """Makes a node's folder for --tls, DIR/ROLE or DIR/ROLE-AGENT: ca.crt, tls.crt, tls.key."""
    from dase_grpc.replay.security.certificates import issue as issue_certificate

    identity = Identity.of(role, agent)
    now = datetime.now(UTC)
    typer.echo(issue_certificate(directory, identity, host or (), now=now, days=days, replace=replace))


@app.command()
def revoke(
    directory: Directory,
    *,
    role: Annotated[
        str | None, option("--role", "Withdraw all certificates of this role and, with --agent, its agent.")
    ] = None,
    agent: Annotated[
        int | None,
        option("--agent", "The agent that they were issued for; else those that were issued for any.", min=0),
    ] = None,
    certificate: Annotated[
        list[Path] | None,
        option("--certificate", "Withdraw the certificate in this file; may be repeated.", metavar="FILE"),
    ] = None,
    days: Annotated[int, option("--days", "How long the list is valid; else 365.", min=1)] = 365,
) -> None:
    """Withdraws certificates: signs DIR/ca.crl, for --crl, anew; with none named, for longer."""
    from dase_grpc.replay.security.certificates import revoke as revoke_certificates

    identity = None if role is None and agent is None else Identity.of(role or "", agent)
    now = datetime.now(UTC)
    typer.echo(revoke_certificates(directory, identity, certificate or (), now=now, days=days).line())


@app.command()
def token(directory: Directory, *, role: RoleOf, agent: AgentOf = None, replace: Replace = False) -> None:
    """Makes a token for --token-file, DIR/ROLE-AGENT.token; DIR itself is what --tokens takes."""
    from dase_grpc.replay.security.tokens import make_token

    typer.echo(make_token(directory, Identity.of(role, agent), replace=replace))


@app.command()
def show(directory: Directory) -> None:
    """Says whose the certificates in DIR and its folders are, for which hosts, and until when."""
    from dase_grpc.replay.security.certificates import certificates_in

    now = datetime.now(UTC)
    for shown in certificates_in(directory):
        typer.echo(shown.line(now))
