"""Whether a resumed run is the run that its checkpoints come from: the same settings, the same software."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import ConfigError

MAY_DIFFER: Final = frozenset(
    {"train.steps", "metrics.port", "replay.storage", "env.max_restarts", "env.timeout_s"}
)


def differences(before: RunConfig, now: RunConfig) -> list[str]:
    """Every setting that differs, with both values; of those that may differ none."""
    pairs = _pairs(before.model_dump(mode="json"), now.model_dump(mode="json"))
    return [
        f"{key}: {old!r} then, {new!r} now" for key, old, new in pairs if old != new and key not in MAY_DIFFER
    ]


def require_same_settings(before: RunConfig, now: RunConfig, *, of: str) -> None:
    """Checks that a run goes on with the settings of a checkpoint; `of` says whose they were.

    Raises:
        ConfigError: naming every setting that differs, with both values.
    """
    found = differences(before, now)
    if found:
        raise ConfigError(
            f"{of} learned with other settings ({'; '.join(found)}); a resumed run keeps its settings, so "
            f"put them back, or start a new run"
        )


def changed_versions(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """What decides numbers and is of another version now, in one sentence; None where nothing is."""
    names = [name for name in before if before[name] != now.get(name)]
    if not names:
        return None
    found = ", ".join(f"{name} {before[name]} then, {now.get(name, 'none')} now" for name in names)
    return f"the run began with other versions ({found}), so it will not go on to the same last bit"


def _pairs(before: Any, now: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict) and prefix.count(".") < 2:
        for key in dict.fromkeys((*before, *now)):
            yield from _pairs(before.get(key), now.get(key), f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), before, now
