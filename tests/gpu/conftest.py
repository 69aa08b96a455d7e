"""Skip, with the reason, what needs a GPU where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from estimator.probe.devices.backend import CudaBackend

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no CUDA device here")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def backend() -> Iterator[CudaBackend]:
    """The first GPU, warm."""
    device = CudaBackend(0)
    device.warm_up(0.5)
    yield device
    torch.cuda.empty_cache()
