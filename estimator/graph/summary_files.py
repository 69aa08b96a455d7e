"""Read the summary of a job, which stands for a graph, from JSON."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from estimator.errors import ModelError, StrategyError, WorkloadError, quoted
from estimator.files import parse_json, read_text
from estimator.graph.summary import WorkloadSummary


def is_summary_file(text: str) -> bool:
    """Whether a MODEL text names a summary of a job: a JSON file."""
    return text.endswith(".json") and not text.startswith("hf:")


def load_summary(path: str | os.PathLike[str]) -> WorkloadSummary:
    """Read a summary, a JSON object of `WorkloadSummary`'s fields.

    Raises ModelError where there is none to read, WorkloadError or StrategyError naming the file
    where it says what cannot be. Its name is the file's unless it has one.
    """
    try:
        data = parse_json(read_text(path))
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}; check the path of the summary") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path} cannot be read as JSON ({reason}); correct the summary") from None
    return summary_from(data, str(path), name=Path(path).stem)


def summary_from(data: Any, where: str, *, name: str = "job") -> WorkloadSummary:
    """The summary that JSON values are, called `name` unless it has one; errors name `where`."""
    known = [item.name for item in fields(WorkloadSummary)]
    if not isinstance(data, dict):
        raise ModelError(f"{where} holds no JSON object; write one with {', '.join(known)}")
    unknown = [key for key in data if key not in known]
    if unknown:
        raise WorkloadError(
            f"{where} has {quoted(unknown[0])}, which is no part of a summary; its parts are "
            f"{', '.join(known)}"
        )
    given: dict[str, Any] = {"name": name, **data}
    try:
        return WorkloadSummary(**given)
    except (WorkloadError, StrategyError) as error:
        raise type(error)(f"{where}: {error}") from None
