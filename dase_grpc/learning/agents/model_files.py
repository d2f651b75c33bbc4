"""Model files, read: an exported policy as what acts and what is told of it; one in ONNX without torch."""

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from dase_grpc.errors import ConfigError, DaseError, UsageError
from dase_grpc.schema import Array

OBSERVATION, ACTION = "observation", "action"
EXTRA: Final = "metadata.json"
"""The name of the metadata within a TorchScript file."""


@dataclass(frozen=True)
class ModelFile:
    """A policy in the environment's units, (B, m) float32 -> (B, *shape), and its metadata."""

    act: Callable[[Array], npt.NDArray[Any]]
    metadata: Mapping[str, Any]


def read_torchscript(path: Path) -> ModelFile:
    """What a file that `write_torchscript` wrote computes.

    Raises:
        UsageError: it is no such file.
    """
    import torch

    extra = {EXTRA: ""}
    with deprecated(), as_usage(path, "TorchScript"):
        module = torch.jit.load(str(path), _extra_files=extra)  # type: ignore[no-untyped-call]  # torch's
        metadata = json.loads(extra[EXTRA] or "{}")

    @torch.inference_mode()
    def act(rows: Array) -> npt.NDArray[Any]:
        actions: npt.NDArray[Any] = module(torch.from_numpy(rows)).numpy()
        return actions

    return ModelFile(act, metadata)


def read_onnx(path: Path) -> ModelFile:
    """What a file that `write_onnx` wrote computes, on the thread that asks.

    Raises:
        ConfigError: the library is not installed.
        UsageError: it is no such file.
    """
    onnxruntime = export_library("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # others would spin between two batches
    with as_usage(path, "ONNX"):
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        told = session.get_modelmeta().custom_metadata_map
        metadata = {key: json.loads(value) for key, value in told.items()}

    def act(rows: Array) -> npt.NDArray[Any]:
        (actions,) = session.run([ACTION], {OBSERVATION: rows})
        found: npt.NDArray[Any] = actions
        return found

    return ModelFile(act, metadata)


READERS: Final[Mapping[str, Callable[[Path], ModelFile]]] = {".onnx": read_onnx, ".pt": read_torchscript}
"""What reads a file, by the end of its name."""


def export_library(name: str) -> Any:
    """A library of the extra `export`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f'ONNX needs the library {name}; run: pip install "dase-grpc[export]"') from None


@contextmanager
def deprecated() -> Iterator[None]:
    """For calls that PyTorch advises against: TorchScript is what older runtimes read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextmanager
def as_usage(path: Path, kind: str) -> Iterator[None]:
    """A block that reads a file as what it should be; that it is none is a UsageError, which says so."""
    try:
        yield
    except DaseError:
        raise
    except Exception as error:  # each library raises its own
        raise UsageError(f"{path} cannot be read as {kind}; write it with `dase export`") from error
