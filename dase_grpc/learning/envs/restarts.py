"""Restarts: environments whose exceptions are told from our own, and one that is made anew when it raises."""

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import EnvironmentFailedError, EnvironmentSpecError
from dase_grpc.learning.envs.answers import RAISED, Call, begun, misuse, summary, taken
from dase_grpc.learning.envs.make import Environment, close_env, make_env
from dase_grpc.pace import pause_s
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import several
from dase_grpc.schema import Array

GOOD_STEPS: Final = 1_000
"""After as many steps without an exception, or an episode that ended, earlier restarts count no more."""

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0

KEPT: Final = "the last checkpoint, if there is one, is kept"
"""What is said of a learner that ends for what went wrong in its environment or its networks."""

MAKE: Final = "make"

_log = logging.getLogger("dase")


class EnvironmentBroke(Exception):
    """A call into the environment raised, or broke its spaces; the environment cannot be used any more.

    Attributes:
        call: "make", "reset" or "step".
        error: what it raised, or an `EnvironmentSpecError` that says what is wrong.
    """

    def __init__(self, call: str, error: BaseException) -> None:
        if isinstance(error, EnvironmentSpecError):
            super().__init__(f"{str(error).partition(';')[0]} (in {call})")
        else:
            super().__init__(f"the environment raised {summary(error)} in {call}")
        self.call = call
        self.error = error

    def is_like(self, other: "EnvironmentBroke | None") -> bool:
        """Whether the interface was broken, and in the same way as by the other.

        What is raised may pass; what is returned comes from the code, which a new environment does not mend.
        """
        breach = self.call != MAKE and isinstance(self.error, EnvironmentSpecError)
        return breach and str(self) == str(other)


def reset(env: Environment, *, seed: int, size: int, look: Callable[[Any], None] | None = None) -> Array:
    """Begins an episode; its first observation, (size,) float32. `look` is shown it as it came.

    Raises:
        EnvironmentSpecError: what came back is not what Gymnasium's interface says.
        EnvironmentBroke: so, but a reset of this agent's environments has been right before; or it raised.
        Exception: whatever an environment raises that nobody watches.
    """
    returned: Any = env.reset(seed=seed)
    try:
        observation = begun(returned, size)
    except EnvironmentSpecError as breach:
        _require_first(env, "reset", breach)
        raise
    if isinstance(env, WatchedEnv):
        env.watch.answered = True
    if look is not None:
        look(returned[0])
    return observation


def step(
    env: Environment, action: Array, *, size: int, look: Callable[[Any], None] | None = None
) -> tuple[Array, float, bool, bool]:
    """A step: the observation, (size,) float32, the reward, terminated, truncated.

    `look` is shown the last observation of an episode as it came. Raises as `reset`.
    """
    returned: Any = env.step(action)
    try:
        values = taken(returned, size)
    except EnvironmentSpecError as breach:
        _require_first(env, "step", breach)
        raise
    if look is not None and (values[2] or values[3]):
        look(returned[0])
    return values


def _require_first(env: Environment, call: Call, breach: EnvironmentSpecError) -> None:
    """Raises EnvironmentBroke where a reset of this agent's environments has been right before."""
    if isinstance(env, WatchedEnv) and env.watch.answered:
        raise EnvironmentBroke(call, breach) from breach


class WatchedEnv(gymnasium.Wrapper[Array, Array, Array, Array]):
    """An environment whose calls a `Watch` sees, and what they raise is an `EnvironmentBroke`.

    Where it breaks its interface, and no reset has been right before, that is an EnvironmentSpecError.
    """

    def __init__(self, make: Callable[[], Environment], watch: Watch, *, purpose: str = "") -> None:
        self.watch = watch
        self._purpose = purpose
        super().__init__(self._made(make))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """The environment's own."""
        self.watch.begin(f"{self._purpose}reset")
        try:
            return self.env.reset(seed=seed, options=options)
        except RAISED as error:
            raise self._broken("reset", error) from error
        finally:
            self.watch.end()

    def step(self, action: Array) -> Any:
        """The environment's own."""
        self.watch.begin(f"{self._purpose}step")
        try:
            return self.env.step(action)
        except RAISED as error:
            raise self._broken("step", error) from error
        finally:
            self.watch.end()

    def close(self) -> None:
        """Closes the environment, unless another thread hangs in it; what it raises is logged."""
        if self.watch.call is None:
            with self.watch.during(f"{self._purpose}close"):
                close_env(self.env, owner=self.watch.owner)

    def _broken(self, call: Call, error: BaseException) -> Exception:
        breach = error if isinstance(error, EnvironmentSpecError) else misuse(call, error)
        if breach is not None and not self.watch.answered:
            return breach
        return EnvironmentBroke(call, breach or error)

    def _made(self, make: Callable[[], Environment]) -> Environment:
        with self.watch.during(f"{self._purpose}making"):
            return make()


class RestartableEnv(WatchedEnv):
    """The environment that an agent explores; `restart` closes it and makes it anew.

    Attributes:
        failures: restarts since the last episode that ended, or since `GOOD_STEPS` good steps.
        good_steps: steps since the last restart.
    """

    def __init__(
        self,
        make: Callable[[], Environment],
        watch: Watch,
        *,
        max_restarts: int,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(make, watch)
        self._make = make
        self._max_restarts = max_restarts
        self._pause = pause
        self._said: set[tuple[str, str]] = set()
        self._last: tuple[EnvironmentBroke, int] | None = None
        self.failures = 0
        self.good_steps = 0

    def went_well(self, *, ended: bool) -> None:
        """Notes a good step and whether it ended its episode."""
        self.good_steps += 1
        if ended or self.good_steps >= GOOD_STEPS:
            self.failures, self._last = 0, None

    def restart(self, broke: EnvironmentBroke, *, where: str) -> None:
        """Makes the environment anew; `where` is said. Waits between attempts, longer each time.

        Raises:
            EnvironmentFailedError: that has been done too often in a row, or it cannot be made any more, or
                it broke its interface as the one before did, after as many steps.
        """
        while True:
            self.failures += 1
            last, self._last = self._last, (broke, self.good_steps)
            same = last is not None and broke.is_like(last[0]) and self.good_steps == last[1]
            self.good_steps = 0
            if same or self.failures > self._max_restarts:
                raise given_up(broke, where=where, restarts=self.failures - 1, same=same) from broke.error
            self._say(broke, where)
            if broke.call != MAKE:
                self.close()
            self._pause(pause_s(self.failures - 1, first_s=FIRST_PAUSE_S, cap_s=LONGEST_PAUSE_S))
            try:
                self.env = self._made(self._make)
            except RAISED as error:
                broke = EnvironmentBroke(MAKE, error)
            else:
                return

    def _say(self, broke: EnvironmentBroke, where: str) -> None:
        """One sentence, with the traceback where this kind of exception is new in this call."""
        kind = (broke.call, type(broke.error).__name__)
        _log.warning(
            "%s: %s, so it is made anew and a new episode begins (restart %d in a row, of at most %d)",
            where,
            broke,
            self.failures,
            self._max_restarts,
            exc_info=None if kind in self._said else broke.error,
        )
        self._said.add(kind)


def given_up(
    broke: EnvironmentBroke, *, where: str, restarts: int, same: bool = False
) -> EnvironmentFailedError:
    """The error of who has seen an environment fail once too often; its traceback goes to the log.

    `same` says that it broke its interface in the same way as before, so that restarts are of no use.
    """
    _log.error("%s: the traceback of the environment", where, exc_info=broke.error)
    if same:
        return EnvironmentFailedError(
            f"{where}: {broke}, and again in the same way when it was made anew; correct the environment "
            f"({KEPT})"
        )
    often = (
        f"after {several(restarts, 'restart')} in a row"
        if restarts
        else "and env.max_restarts = 0 allows no restart"
    )
    return EnvironmentFailedError(
        f"{where}: {broke}, {often}; correct the environment, whose traceback is in the log, or raise "
        f"env.max_restarts ({KEPT})"
    )


def exploring_env(config: EnvConfig, watch: Watch) -> RestartableEnv:
    """The environment that an agent explores, made now; an EnvironmentSpecError where it cannot be."""
    return RestartableEnv(lambda: make_env(config.id, config.kwargs), watch, max_restarts=config.max_restarts)


def evaluation_env(config: EnvConfig, watch: Watch) -> WatchedEnv:
    """An environment for an evaluation, made now.

    Raises:
        EnvironmentSpecError: it cannot be made.
        EnvironmentBroke: so, but a reset of this agent's environments has been right before.
    """
    try:
        return WatchedEnv(lambda: make_env(config.id, config.kwargs), watch, purpose="evaluation ")
    except RAISED as error:
        if watch.answered:
            raise EnvironmentBroke(MAKE, error) from error
        raise
