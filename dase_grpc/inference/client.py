"""The client of a served policy: it acts as a TrainedPolicy does, and needs neither torch nor a run."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self

import grpc

from dase_grpc.config.arguments import path
from dase_grpc.config.texts import shown
from dase_grpc.errors import ConfigError, UnreachableError, UsageError
from dase_grpc.inference.v1.inference_pb2 import ActRequest, ActResponse, DescribePolicyRequest
from dase_grpc.inference.v1.inference_pb2_grpc import InferenceServiceStub
from dase_grpc.inference.wire import Actions, PolicyDescription, read_actions, to_rows, write_observations
from dase_grpc.replay.security.dialler import Credentials, require_not_forked
from dase_grpc.replay.wire.addresses import CLIENT_OPTIONS, parse_address
from dase_grpc.replay.wire.status import service

CALL_S: Final = 5.0
LONGEST_S: Final = 86_400


class PolicyClient:
    """The policy that `dase serve` serves at HOST:PORT; for any number of threads.

    Connects with the first call, and again by itself where the connection broke. `tls` is a folder with
    ca.crt, tls.crt and tls.key of the role client or, with a `token_file`, ca.crt alone; files that change
    are taken into use. A call that is not answered within `timeout_s` is given up, on both sides; none is
    sent twice.

    Raises:
        AddressError, CredentialsError, ConfigError: what was given cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: str | Path | None = None,
        token_file: str | Path | None = None,
        timeout_s: float = CALL_S,
    ) -> None:
        if not isinstance(timeout_s, float | Real) or not 0 < timeout_s <= LONGEST_S:  # NaN is neither
            raise ConfigError(
                f"timeout_s = {shown(timeout_s)} is no time limit of an answer; give seconds above 0, up to "
                f"{LONGEST_S:,}"
            )
        self._address, self._timeout_s = parse_address(address), float(timeout_s)
        files = (("tls", tls), ("token_file", token_file))
        self._credentials = Credentials(*(None if each is None else path(what, each) for what, each in files))
        self._credentials.require_usable()
        self._channels = self._credentials.blocking_channels(self._address.target, CLIENT_OPTIONS)
        self._line: tuple[grpc.Channel, InferenceServiceStub] | None = None
        self._was_answered = self._is_closed = False

    @cached_property
    def description(self) -> PolicyDescription:
        """Which policy it is, what it observes and how it acts; asked once.

        Raises:
            DaseError: as `act`.
        """
        return PolicyDescription.from_proto(self._call("DescribePolicy", DescribePolicyRequest()))

    def act(self, observation: Any) -> Actions:
        """The action without noise, of the action space's shape and dtype.

        Of a batch, an array with one dimension more than an observation's or a list of observations, the
        actions of each, stacked. One of a Dict, Tuple or discrete space goes flat, as
        gymnasium.spaces.flatten gives it. Observations are sent as float32.

        Raises:
            EnvironmentSpecError: the observation is not one of the space.
            MalformedError: it is not finite.
            OverloadedError: the service has too much to do.
            UnreachableError: it does not answer.
            UnauthenticatedError, NotPermittedError: it does not let this client in.
            UsageError: the client was closed, or this process was forked from one that has called.
        """
        return self._acted(observation, partial(self._call, "Act"))

    @contextmanager
    def stream(self) -> Iterator[Callable[[Any], Actions]]:
        """An `act` whose calls share a stream and so take three quarters of the time; threads take turns.

        An error ends the stream, so begin another one after it.
        """
        requests: SimpleQueue[ActRequest | None] = SimpleQueue()
        call = self._stub().ActStream(iter(requests.get, None))
        limit, turn = _TimeLimit(call, self._timeout_s), threading.Lock()

        def asked(request: ActRequest) -> ActResponse:
            with turn, self._failures(), limit.asking():
                requests.put(request)
                return next(call)

        try:
            yield lambda observation: self._acted(observation, asked)
        finally:
            requests.put(None)
            limit.end()
            call.cancel()

    def close(self) -> None:
        """Ends the connection; calls that are open fail, and so does each one after it."""
        self._is_closed = True
        if self._line is not None:
            self._line[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stub(self) -> InferenceServiceStub:
        require_not_forked()
        if self._is_closed:
            raise UsageError(f"this client of {self._address} is closed; make another one")
        channel = self._channels()
        if self._line is None or self._line[0] is not channel:
            self._line = channel, InferenceServiceStub(channel)
        return self._line[1]

    def _acted(self, observation: Any, ask: Callable[[ActRequest], ActResponse]) -> Actions:
        policy = self.description
        rows, single = to_rows(observation, policy)
        actions = read_actions(ask(write_observations(rows)), len(rows), policy)
        return actions[0] if single else actions

    def _call(self, method: str, request: Any) -> Any:
        with self._failures():
            return getattr(self._stub(), method)(request, timeout=self._timeout_s)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raises our errors for a call's; where there never was an answer, credentials may be why."""
        try:
            with service(str(self._address), "policy server"):
                yield
        except UnreachableError:
            if not self._was_answered:
                self._require_let_in()
            raise
        self._was_answered = True

    def _require_let_in(self) -> None:
        """Says so where credentials are why there is no answer; on a thread, for this one may have a loop."""
        asked = self._credentials.require_let_in(self._address.host, self._address.port)
        with ThreadPoolExecutor(1) as other:
            other.submit(asyncio.run, asked).result()


class _TimeLimit:
    """Cancels a stream whose answer does not come in time, by a thread of its own, or is not waited for."""

    def __init__(self, call: Any, seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._since: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="policy stream", daemon=True)
        self._thread.start()

    @contextmanager
    def asking(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        except BaseException:  # the answer may come yet, and would be taken for the next one's
            self._call.cancel()
            raise
        finally:
            self._since = None

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._seconds / 4):
            since = self._since
            if since is not None and time.monotonic() - since > self._seconds:
                self._call.cancel()
