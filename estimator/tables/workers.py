"""Have the workers of an executor work out many items of one question, which each is sent once."""

from __future__ import annotations

import hashlib
import pickle
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from itertools import islice
from typing import Any, TypeVar

from estimator.errors import WorkloadError

Shared = TypeVar("Shared")
Item = TypeVar("Item")
Result = TypeVar("Result")
# Of (what is shared, what a worker keeps between the items of one call, an item).
Work = Callable[[Shared, dict[str, Any], Item], Result]

# Items sent ahead of the one that is waited for: all workers have work, and memory stays flat.
_IN_FLIGHT = 32
# Questions that a thread of a worker keeps.
_MOST_KEPT = 8
_worker = threading.local()


def map_shared(
    executor: Executor | None,
    work: Work[Shared, Item, Result],
    shared: Shared,
    items: Iterable[Item],
) -> Iterator[tuple[Item, Result]]:
    """(item, work of it) in order, on an executor's workers or here without one.

    Items are taken as they are sent, some ahead. What is `shared` is sent to each worker once,
    however many items and calls there are; what a worker keeps holds for one call: machines may be
    probed anew before the next. What a worker that died had is done again. Raises WorkloadError
    where `shared` cannot be pickled, and what `work` raises.
    """
    kept: dict[str, Any] = {}
    if executor is None:
        for item in items:
            yield item, work(shared, kept, item)
        return
    try:
        content = pickle.dumps(shared)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise WorkloadError(
            f"the question cannot be sent to other processes ({error}); leave out executor"
        ) from None
    sender = _Sender(executor, work, hashlib.sha256(content).hexdigest())
    remaining = iter(items)
    waiting = deque((item, sender.sent(item, None)) for item in islice(remaining, _IN_FLIGHT))
    while waiting:
        item, future = waiting.popleft()
        found = sender.result(future)
        if found is None and future is not None:
            found = sender.result(sender.sent(item, content))
        yield item, found[0] if found is not None else work(shared, kept, item)
        for following in islice(remaining, 1):
            waiting.append((following, sender.sent(following, None)))


class _Sender:
    """Sends items to the workers of an executor until it breaks."""

    def __init__(self, executor: Executor, work: Work[Any, Any, Any], key: str) -> None:
        self._executor, self._work, self._key = executor, work, key
        self._call = secrets.token_hex(8)
        self._is_broken = False

    def sent(self, item: Any, content: bytes | None) -> Future[tuple[Any] | None] | None:
        if self._is_broken:
            return None
        try:
            return self._executor.submit(
                _worked_out, self._work, self._key, self._call, content, item
            )
        except (BrokenExecutor, RuntimeError):
            self._is_broken = True
            return None

    def result(self, future: Future[tuple[Any] | None] | None) -> tuple[Any] | None:
        """What came back; None where the worker lacks the question, or is no more."""
        try:
            return None if future is None else future.result()
        except (BrokenExecutor, CancelledError):
            # A pool of processes ends with the first that dies: the rest is done here.
            self._is_broken = True
            return None


def _worked_out(
    work: Work[Any, Any, Any], key: str, call: str, content: bytes | None, item: Any
) -> tuple[Any] | None:
    """The work of an item, on a worker; None where it has yet to be sent what is shared."""
    shared: OrderedDict[str, Any] = vars(_worker).setdefault("shared", OrderedDict())
    if key not in shared:
        if content is None:
            return None
        shared[key] = pickle.loads(content)
        if len(shared) > _MOST_KEPT:
            shared.popitem(last=False)
    if vars(_worker).get("call") != call:
        _worker.call, _worker.kept = call, {}
    return (work(shared[key], _worker.kept, item),)
