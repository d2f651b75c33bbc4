"""Options of a policy server, which `dase serve` runs, each a field of which the command makes its flag."""

from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import ConfigError
from dase_grpc.nodes.options import ServiceOptions, flag
from dase_grpc.replay.wire.addresses import Address, parse_address

DEFAULT_POLICY_ADDRESS: Final = "127.0.0.1:50052"
MAX_BATCH: Final = 64
MAX_QUEUE: Final = 1_024


def _delay_s(milliseconds: float) -> float:
    if not 0 <= milliseconds <= 10_000:
        raise ConfigError(f"--max-delay-ms {milliseconds:g} is no delay; give milliseconds, 0 to 10000")
    return milliseconds / 1_000


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ServiceOptions):
    """What a policy server is told on its command line."""

    listen: Address = flag(
        parse_address(DEFAULT_POLICY_ADDRESS),
        "--listen",
        f"Where to listen, else {DEFAULT_POLICY_ADDRESS}; port 0 is any.",
        read=parse_address,
        metavar="HOST:PORT",
    )
    max_batch: int = flag(
        MAX_BATCH,
        "--max-batch",
        f"Observations of several requests that are computed together, at most; else {MAX_BATCH}.",
        int,
        min=1,
    )
    max_delay_s: float = flag(
        0.0,
        "--max-delay-ms",
        "How long a request waits for others to be computed with, at most; else 0: with what came while the "
        "policy was busy.",
        float,
        read=_delay_s,
        metavar="MS",
    )
    max_queue: int = flag(
        MAX_QUEUE,
        "--max-queue",
        f"Observations that may wait, and of one request; beyond it requests are refused. Else {MAX_QUEUE}.",
        int,
        min=1,
    )
