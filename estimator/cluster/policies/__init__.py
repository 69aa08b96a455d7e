"""Scheduling policies: one file each, one interface, `estimator.cluster.view.Policy`."""

from __future__ import annotations

import importlib

from estimator.cluster.view import PlanOf, Policy
from estimator.errors import WorkloadError

# A policy's name, the module and the class that have it.
_HOMES = {
    "fifo": ("fifo", "Fifo"),
    "max-min": ("max_min", "MaxMin"),
    "max-min-uncapped": ("max_min", "UncappedMaxMin"),
    "srtf": ("srtf", "Srtf"),
    "afs": ("afs", "Afs"),
    "optimus": ("optimus", "Optimus"),
    "tiresias": ("tiresias", "Tiresias"),
    "gavel": ("gavel", "Gavel"),
    "pollux": ("pollux", "Pollux"),
    "ones": ("ones", "Ones"),
}
BUILT_IN = tuple(_HOMES)


def load_policy(text: str) -> Policy:
    """A policy by its name, or a user's as ``module:name``: a function of a view, or a class.

    Raises WorkloadError.
    """
    where, separator, name = text.partition(":")
    if separator:
        try:
            found = getattr(importlib.import_module(where), name)
        except (ImportError, AttributeError) as error:
            raise WorkloadError(
                f"policy '{text}' cannot be imported ({error}); write module:function"
            ) from None
        if not isinstance(found, type):
            return PlanOf(found)
        own: Policy = found()
        return own
    if text not in _HOMES:
        raise WorkloadError(
            f"'{text}' is no policy; use {', '.join(_HOMES)} or your own as module:function"
        )
    home, kind = _HOMES[text]
    built: Policy = getattr(importlib.import_module(f"{__name__}.{home}"), kind)()
    return built
