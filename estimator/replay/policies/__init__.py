"""Scheduling policies behind one interface, `estimator.replay.view.Policy`."""

from __future__ import annotations

import importlib

from estimator.errors import UserCode, WorkloadError, quoted
from estimator.replay.view import PlanOf, Policy

# A policy's name, the module and the class that have it.
_HOMES = {
    "fifo": ("queues", "Fifo"),
    "max-min": ("elastic", "MaxMin"),
    "max-min-uncapped": ("elastic", "UncappedMaxMin"),
    "srtf": ("queues", "Srtf"),
    "afs": ("elastic", "Afs"),
    "optimus": ("elastic", "Optimus"),
    "tiresias": ("queues", "Tiresias"),
    "gavel": ("queues", "Gavel"),
    "pollux": ("goodput", "Pollux"),
    "sia": ("goodput", "Sia"),
    "ones": ("ones", "Ones"),
}
BUILT_IN = tuple(_HOMES)


def load_policy(text: str) -> Policy:
    """A policy by its name, or a user's as ``module:name``: a function of a view, or a class.

    Raises WorkloadError.
    """
    where, separator, name = text.partition(":")
    if separator:
        with UserCode(
            f"policy {quoted(text)} cannot be imported",
            advice="write module:function",
            error=WorkloadError,
        ):
            policy = getattr(importlib.import_module(where), name)
            own: Policy = policy() if isinstance(policy, type) else PlanOf(policy)
        return own
    if text not in _HOMES:
        raise WorkloadError(
            f"{quoted(text)} is no policy; use {', '.join(_HOMES)} or your own as module:function"
        )
    home, kind = _HOMES[text]
    built: Policy = getattr(importlib.import_module(f"{__name__}.{home}"), kind)()
    return built
