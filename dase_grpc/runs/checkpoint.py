"""A checkpoint: tensors as safetensors, everything else as JSON, in one directory that appears at once.

state.safetensors is the agent; training.safetensors and the entry `training` of checkpoint.json are what
else a resumed run goes on from. Each file has a checksum, checkpoint.json itself too.

No pickle is read or written, and nothing in the files depends on the time or the machine, so two
identical runs leave identical bytes.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dase_grpc.config.resolve import RunConfig, resolve
from dase_grpc.config.texts import finite_json, with_infinite
from dase_grpc.errors import DaseError, RunDirectoryError
from dase_grpc.runs.directory import (
    CHECKPOINT_FILE,
    checkpoint_path,
    checkpoint_paths,
    replaced_path,
    replaced_paths,
)
from dase_grpc.runs.files import (
    SEAL,
    STAGING_PREFIX,
    checked_bytes,
    json_text,
    read_document,
    reading,
    require_seal,
    sealed,
    staged_directory,
    write_synced,
    written,
)
from dase_grpc.schema import TransitionSchema

Tensors = Mapping[str, Tensor]

FORMAT_VERSION: Final = 2
KEEP: Final = 2
STATE_FILE: Final = "state.safetensors"
TRAINING_FILE: Final = "training.safetensors"
METADATA_FILE: Final = CHECKPOINT_FILE


@dataclass(frozen=True)
class Checkpoint:
    """What `load_checkpoint` read: tensors on the CPU by name, and the metadata.

    `training_tensors` is what a resumed run needs besides; empty where the checkpoint only has a policy.
    `run_config`, `config`, `schema` and `agent_id` are there when the metadata came from `describe`; else,
    and when it is of another version, they raise RunDirectoryError.
    """

    path: Path
    step: int
    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    training_tensors: dict[str, Tensor]

    def __str__(self) -> str:
        """Whose state it is, and when."""
        return f"agent {self.agent_id} at step {self.step:,}"

    @property
    def training(self) -> dict[str, Any]:
        """What else a resumed run goes on from."""
        return self._entry("training")

    @property
    def seal(self) -> str:
        """The checksum of everything in the checkpoint."""
        return str(self.metadata[SEAL])

    @property
    def run_config(self) -> RunConfig:
        """The whole configuration of the run."""
        try:
            return resolve(with_infinite(self._entry("config")))
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
    return {
        **more,
        "config": finite_json(config.model_dump(mode="json")),
        "schema": asdict(schema),
        "agent_id": agent_id,
    }


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tensors: Tensors,
    metadata: Mapping[str, Any],
    training_tensors: Tensors | None = None,
    keep: int = KEEP,
) -> Path:
    """Writes `directory/step-<step>`, removes all but the last `keep` and the best; returns it once on disk.

    `metadata` is anything JSON can hold without NaN. A checkpoint of the same step is replaced, once the
    new one is on the disk. One writer per directory. Tensors are copied to the CPU, which waits for their
    device.
    """
    files = {STATE_FILE: _bytes(tensors), TRAINING_FILE: _bytes(training_tensors or {})}
    state, training = (hashlib.sha256(data).hexdigest() for data in files.values())
    told = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "state_sha256": state,
        "training_sha256": training,
    }
    document = sealed({**metadata, **told})
    target = checkpoint_path(directory, step)
    with written(f"the checkpoint {target}"):
        _put_back(directory)
        if _is_sound(target, document[SEAL]):
            return target
        _discard_staged(directory)
        with staged_directory(target, aside=replaced_path(target)) as staged:
            for name, data in {**files, METADATA_FILE: json_text(document).encode()}.items():
                write_synced(staged / name, data)
        _prune(directory, keep=keep)
        _discard_staged(directory)
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads one checkpoint directory and verifies its checksum."""
    metadata = _read_metadata(path / METADATA_FILE)
    version = metadata.get("format_version", FORMAT_VERSION)  # without one it is damaged, which the seal says
    if version != FORMAT_VERSION:
        raise RunDirectoryError(
            f"the checkpoint {path} has format {version!r}, "
            f"this version of dase reads format {FORMAT_VERSION}"
        )
    require_seal(metadata, f"the checkpoint {path} is damaged: {METADATA_FILE}")
    damaged = f"the checkpoint {path} is damaged: its checksum does not match"
    files = [
        checked_bytes(path / name, metadata.get(key), damaged=f"{damaged} {name}")
        for name, key in ((STATE_FILE, "state_sha256"), (TRAINING_FILE, "training_sha256"))
    ]
    try:
        tensors, training_tensors = map(safetensors.torch.load, files)
        return Checkpoint(path, int(metadata["step"]), tensors, metadata, training_tensors)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise RunDirectoryError(f"the checkpoint {path} is damaged: {error}") from None


def checkpoints(directory: Path) -> list[Path]:
    """The finished checkpoints of one agent, by step; none if there is no directory."""
    return list(checkpoint_paths(directory).values())


def latest(directory: Path) -> Path | None:
    """The checkpoint with the highest step, if there is any."""
    return next(reversed(checkpoints(directory)), None)


def seal_of(path: Path) -> str:
    """The checksum of everything in a checkpoint that was just written."""
    return str(_read_metadata(path / METADATA_FILE).get(SEAL))


def newest_sound(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint with the highest step that is not damaged, and what is wrong with later ones."""
    passed_over: list[str] = []
    for path in reversed(checkpoints(directory)):
        try:
            return load_checkpoint(path), passed_over
        except RunDirectoryError as error:
            passed_over.append(str(error))
    return None, passed_over


def best(directory: Path) -> Path | None:
    """The checkpoint whose own step had the highest mean return in an evaluation; of equals the latest.

    None where no checkpoint was evaluated at its step.
    """
    scores = {path: score for path in checkpoints(directory) if (score := _score(path)) is not None}
    return max(reversed(scores), key=lambda path: scores[path], default=None)


def _score(path: Path) -> float | None:
    try:
        metadata = _read_metadata(path / METADATA_FILE)
    except RunDirectoryError:
        return None
    score, step = metadata.get("evaluation"), metadata.get("step")
    return score if isinstance(score, float) and metadata.get("evaluation_step") == step else None


def _bytes(tensors: Tensors) -> bytes:
    """Of contiguous copies on the CPU that share memory with nothing, which safetensors asks for."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    data: bytes = safetensors.torch.save(copies)
    return data


def _is_sound(path: Path, seal: str) -> bool:
    """Whether the very same checkpoint is there already: taking its place would risk it for nothing."""
    try:
        return path.exists() and load_checkpoint(path).seal == seal
    except RunDirectoryError:
        return False


def _put_back(directory: Path) -> None:
    """Puts back what a killed writer had moved aside, and removes it where the other had taken its place."""
    for path, target in replaced_paths(directory):
        if target.exists():
            shutil.rmtree(path)
        else:
            path.rename(target)


def _prune(directory: Path, *, keep: int) -> None:
    kept = {best(directory), *checkpoints(directory)[-keep:]}
    for path in checkpoints(directory):
        if path not in kept:
            shutil.rmtree(path)


def _discard_staged(directory: Path) -> None:
    """Removes what this and killed writers have left under other names, so that it takes no room."""
    for path in directory.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(path)


def _read_metadata(file: Path) -> dict[str, Any]:
    with reading(file):
        if not file.exists():
            raise RunDirectoryError(f"{file.parent} is not a checkpoint: it has no {METADATA_FILE}")
    return read_document(file)
