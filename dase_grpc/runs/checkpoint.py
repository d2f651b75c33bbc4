"""A checkpoint: tensors as safetensors, everything else as JSON, in one directory that appears at once.

No pickle is read or written, and nothing in the files depends on the time or the machine, so two
identical runs leave identical bytes.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dase_grpc.config import RunConfig, resolve
from dase_grpc.errors import DaseError, RunDirectoryError
from dase_grpc.parsing import json_value
from dase_grpc.runs.directory import checkpoint_paths
from dase_grpc.runs.files import STAGING_PREFIX, staged_directory, write_synced
from dase_grpc.schema import TransitionSchema

Tensors = Mapping[str, Tensor]

FORMAT_VERSION: Final = 1
KEEP: Final = 2
STATE_FILE: Final = "state.safetensors"
METADATA_FILE: Final = "checkpoint.json"
_REPLACED: Final = f"{STAGING_PREFIX}replaced"


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read: tensors on the CPU by name, and the metadata.

    `run_config`, `config`, `schema` and `agent_id` are there when the metadata came from `describe`.

    Raises:
        RunDirectoryError: by those four, when the metadata lacks them or is of another version.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]

    @property
    def run_config(self) -> RunConfig:
        """The whole configuration of the run."""
        try:
            return resolve(self._entry("config"))
        except DaseError as error:
            raise RunDirectoryError(f"{self.path} is of another version: {error}") from None

    @property
    def config(self) -> RunConfig:
        """The run as this agent lives it: with its own settings as `agent`."""
        config = self.run_config
        if config.members and not 0 <= self.agent_id < len(config.members):
            raise RunDirectoryError(f"{self.path} is of agent {self.agent_id}, which its run does not have")
        return config.for_agent(self.agent_id)

    @property
    def schema(self) -> TransitionSchema:
        """The transitions that the agent learned from."""
        entry = self._entry("schema")
        try:
            bounds = {key: tuple(entry[key]) for key in ("action_low", "action_high")}
            return TransitionSchema(**{**entry, **bounds})
        except (KeyError, TypeError, DaseError) as error:
            raise RunDirectoryError(f"{self.path} has a damaged schema: {error}") from None

    @property
    def agent_id(self) -> int:
        """The agent whose state this is."""
        entry = self.metadata.get("agent_id")
        if not isinstance(entry, int):
            raise RunDirectoryError(f"{self.path} does not say whose state it is")
        return entry

    def _entry(self, key: str) -> dict[str, Any]:
        entry = self.metadata.get(key)
        if not isinstance(entry, dict):
            raise RunDirectoryError(f"{self.path} has no {key} in its {METADATA_FILE}")
        return entry


def describe(config: RunConfig, schema: TransitionSchema, *, agent_id: int, **more: Any) -> dict[str, Any]:
    """The metadata with which a checkpoint can be evaluated on its own; `more` is stored beside it.

    config is the whole run's.
    """
    entries = {"config": config.model_dump(mode="json"), "schema": asdict(schema), "agent_id": agent_id}
    return {**more, **entries}


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tensors: Tensors,
    metadata: Mapping[str, Any],
    keep: int = KEEP,
) -> Path:
    """Writes `directory/step-<step>` and removes all but the last `keep`; returns it once on disk.

    `metadata` is anything JSON can hold without NaN. A checkpoint of the same step is replaced.
    One writer per directory. Tensors are copied to the CPU, which waits for their device.

    Raises:
        RunDirectoryError: the disk refuses, in one sentence.
        ValueError, TypeError: `metadata` is not JSON.
    """
    state = safetensors.torch.save({name: _plain(tensor) for name, tensor in sorted(tensors.items())})
    document = {
        **metadata,
        "format_version": FORMAT_VERSION,
        "step": step,
        "state_sha256": hashlib.sha256(state).hexdigest(),
    }
    text = json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    target = directory / f"step-{step:09d}"
    try:
        _set_aside(target)
        with staged_directory(target) as staged:
            write_synced(staged / STATE_FILE, state)
            write_synced(staged / METADATA_FILE, text.encode())
        _prune(directory, keep=keep)
    except OSError as error:
        raise RunDirectoryError(f"cannot write the checkpoint {target}: {error.strerror or error}") from None
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads one checkpoint directory and verifies its checksum.

    Raises:
        RunDirectoryError: it is missing, damaged, or of a newer format; one sentence.
    """
    metadata = _read_metadata(path / METADATA_FILE)
    if metadata.get("format_version") != FORMAT_VERSION:
        raise RunDirectoryError(
            f"the checkpoint {path} has format {metadata.get('format_version')!r}, "
            f"this version of dase reads format {FORMAT_VERSION}"
        )
    try:
        state = (path / STATE_FILE).read_bytes()
    except OSError as error:
        raise RunDirectoryError(f"cannot read {path / STATE_FILE}: {error.strerror or error}") from None
    if hashlib.sha256(state).hexdigest() != metadata.get("state_sha256"):
        raise RunDirectoryError(f"the checkpoint {path} is damaged: its checksum does not match")
    try:
        return Checkpoint(path, int(metadata["step"]), safetensors.torch.load(state), metadata)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RunDirectoryError(f"the checkpoint {path} is damaged: {error}") from None


def checkpoints(directory: Path) -> list[Path]:
    """The finished checkpoints of one agent, by step; none if there is no directory."""
    return list(checkpoint_paths(directory).values())


def latest(directory: Path) -> Path | None:
    """The checkpoint with the highest step, if there is any."""
    return next(reversed(checkpoints(directory)), None)


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares memory with nothing, which safetensors asks for."""
    return tensor.detach().cpu().contiguous().clone()


def _set_aside(target: Path) -> None:
    if target.exists():
        target.rename(target.with_name(f"{_REPLACED}-{target.name}"))


def _prune(directory: Path, *, keep: int) -> None:
    for path in (*checkpoints(directory)[:-keep], *directory.glob(f"{STAGING_PREFIX}*")):
        shutil.rmtree(path)


def _read_metadata(file: Path) -> dict[str, Any]:
    try:
        metadata = json_value(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunDirectoryError(f"{file.parent} is not a checkpoint: it has no {METADATA_FILE}") from None
    except OSError as error:
        raise RunDirectoryError(f"cannot read {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise RunDirectoryError(f"{file} is damaged: {error}") from None
    if not isinstance(metadata, dict):
        raise RunDirectoryError(f"{file} is damaged: it is not a JSON object")
    return metadata
