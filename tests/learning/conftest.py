"""Tiny networks run fastest on one thread, whatever else the machine does; tensors that nobody may read."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

READS = (
    *("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"),
    *("__array__", "__len__", "__iter__", "__contains__"),
)
"""What of a tensor needs its values, or a shape that depends on them, on the host."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Inside it, as on a device that one would wait for, reading a tensor on the host is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("synchronised with the host")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patched:
            for name in READS:
                patched.setattr(torch.Tensor, name, refuse)
            yield

    return refusing
