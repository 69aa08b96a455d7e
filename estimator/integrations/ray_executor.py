"""Let Ray's workers take work as those of any `concurrent.futures.Executor` do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any

from estimator.errors import WorkloadError


class RayExecutor(Executor):
    """Submits calls as Ray tasks: ``estimate_chunks(..., executor=RayExecutor())``.

    Ray is started by its user (``ray.init``). Raises WorkloadError where it is not installed.
    """

    def __init__(self) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ModuleNotFoundError:
            raise WorkloadError("RayExecutor needs Ray; install ray") from None

    def submit(self, call: Callable[..., Any], /, *words: Any, **more: Any) -> Future[Any]:
        """The future of a call on one of Ray's workers."""
        future: Future[Any] = self._ray.remote(call).remote(*words, **more).future()
        return future
