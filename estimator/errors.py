"""The exceptions of the package; each message says what was wrong, what was found, what to do.

EstimatorError
├── ProfileError        a profile is damaged, impossible or lacks what was asked (ValueError)
├── UnknownMachineError no profile goes by that name (LookupError)
├── ImportedFileError   a file of another tool is unknown, cut off or contradictory (ValueError)
├── AllocationError     an allocation cannot be read, or asks for what does not exist (ValueError)
├── RowError            a table of estimates has no such row (IndexError)
├── PriceError          a price is not known, or a file of them cannot be read (ValueError)
├── TopologyError       a cluster file cannot be read, or describes no tree (ValueError)
├── StrategyError       a parallel strategy, optimizer or precision is unknown (ValueError)
├── WorkloadError       a batch, a sample count or the summary of a job is impossible (ValueError)
├── ModelError          a model cannot be built, called or found (ValueError)
├── TraceError          a model cannot be traced (RuntimeError)
├── GraphFileError      a saved graph is damaged or from another version (ValueError)
├── ObservationError    an observed step time, or a table of them, makes no sense (ValueError)
├── ProbeError          a measurement cannot be made on this machine (RuntimeError)
├── TrainingError       a real training run, started to be measured, failed (RuntimeError)
└── StoreError          a file of the user's store cannot be read or written (OSError)
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

# An error quotes so much of what it found; the rest is cut.
MOST_QUOTED = 100
# Of what an error repeats as it is, such as a path; and of a whole error.
_MOST_REPEATED, _MOST_SAID = 200, 1000
# Letters before a quote make an apostrophe of it.
_LONG = re.compile(rf"(?<!\w)'[^']{{{_MOST_REPEATED},}}'(?!\w)|\S{{{_MOST_REPEATED},}}")


class EstimatorError(Exception):
    """Root of every error that the package raises on purpose.

    >>> import estimator as est
    >>> try:
    ...     est.load_profile("h100")
    ... except est.EstimatorError as error:
    ...     type(error).__name__
    'UnknownMachineError'
    """

    def __str__(self) -> str:
        return sentence(super().__str__())


class ProfileError(EstimatorError, ValueError):
    """A machine profile is damaged, impossible, or lacks what was asked of it."""


class UnknownMachineError(EstimatorError, LookupError):
    """No machine profile goes by that name."""


class ImportedFileError(EstimatorError, ValueError):
    """A file of another tool is in no known format, cut off, or contradicts another."""


class AllocationError(EstimatorError, ValueError):
    """An allocation cannot be read, or asks for devices that do not exist."""


class RowError(EstimatorError, IndexError):
    """A table of estimates has no such row."""


class PriceError(EstimatorError, ValueError):
    """A machine's price is not known, or a file of prices cannot be read."""


class TopologyError(EstimatorError, ValueError):
    """A cluster file cannot be read, or its switches are not a tree."""


class StrategyError(EstimatorError, ValueError):
    """A parallel strategy, optimizer or precision is unknown or impossible."""


class WorkloadError(EstimatorError, ValueError):
    """A batch or sample count fits no model or allocation, or a job's summary cannot be."""


class ModelError(EstimatorError, ValueError):
    """A model cannot be found, built or called."""


class TraceError(EstimatorError, RuntimeError):
    """A model cannot be traced."""


class GraphFileError(EstimatorError, ValueError):
    """A saved graph is damaged or written by another version."""


class ObservationError(EstimatorError, ValueError):
    """An observed step time, or a table of them, makes no sense."""


class ProbeError(EstimatorError, RuntimeError):
    """A measurement cannot be made on this machine."""


class TrainingError(EstimatorError, RuntimeError):
    """A real training run, started to be measured, failed."""


class StoreError(EstimatorError, OSError):
    """A file of the user's store cannot be read or written."""


def cause(error: BaseException) -> str:
    """What an exception of reading a file says, in the words of the file rather than of Python.

    >>> cause(FileNotFoundError(2, "No such file or directory", "a.db"))
    'No such file or directory'
    """
    if isinstance(error, (TypeError, AttributeError)):
        return "a value is of another kind than it should be"
    if isinstance(error, KeyError):
        return f"it lacks {quoted(error.args[0])}"
    if "to unpack" in str(error):
        return "a list is longer or shorter than it should be"
    return printable(" ".join((getattr(error, "strerror", None) or str(error)).split()))


def first_fault(error: Any) -> tuple[str, BaseException | None]:
    """What a ValidationError of pydantic found first, in the words of a file, not of Python.

    The second is the error of ours that it stands for, where a value checked itself.
    """
    first = error.errors(include_url=False)[0]
    own = first.get("ctx", {}).get("error")
    if first["type"] == "extra_forbidden":
        reason = "is unknown"
    elif first["type"] == "missing":
        reason = "is missing"
    else:
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        reason = reason.replace("should be", "must be")
        for theirs, ours in _IN_WORDS_OF_FILES.items():
            reason = re.sub(theirs, ours, reason)
        if own is None and not isinstance(first["input"], dict | list | tuple):
            reason += f", found {quoted(first['input'])}"
    where = ".".join(str(part) for part in first["loc"]) or "top level"
    return f"{printable(where)}: {printable(reason)}", own


_IN_WORDS_OF_FILES = {
    r"a (valid )?dictionary( or (an )?instance of \w+)?": "a table of names and values",
    "a valid tuple": "a list",
    "a valid string": "a text",
    "a valid integer.*": "a whole number",
    "a valid number": "a number",
}


def quoted(value: object) -> str:
    """What was found, as an error quotes it: printable, in one line, and not long.

    >>> quoted("two\\nlines"), quoted(10**5000)
    ("'two\\\\nlines'", 'a number of more than 4300 digits')
    """
    if isinstance(value, str):
        value = value[: MOST_QUOTED + 1]
    try:
        text = repr(value)
    except ValueError:  # Python prints no longer integers
        return "a number of more than 4300 digits"
    return printable(text)


def printable(text: str) -> str:
    """A text without what would move a terminal's cursor, in one line, and not long.

    >>> printable("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    text = spelt_out(text[: MOST_QUOTED + 1])
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def spelt_out(text: str, *, lines: bool = False) -> str:
    """A text whose control characters are spelt out, but for the ends of its `lines` and tabs.

    >>> spelt_out("a\\x1b[31mb\\n", lines=True)
    'a\\\\x1b[31mb\\n'
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )


def sentence(text: str) -> str:
    """What is said to people: printable, in one line, and of long inputs both ends.

    >>> sentence("no file " + "x" * 1000 + ".json")
    'no file xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx.json'
    """
    if not text.isprintable():
        text = spelt_out(" ".join(text.split()))
    if len(text) < _MOST_REPEATED:
        return text
    return _ends(_LONG.sub(lambda found: _ends(found[0], 80), text), _MOST_SAID)


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


class UserCode:
    """Runs code that is not ours: whatever it raises becomes one of our errors; ours pass.

    `what` says what was attempted, `advice` what to do about a failure.
    """

    def __init__(self, what: str, *, advice: str, error: type[EstimatorError]) -> None:
        self._what, self._advice, self._error = what, advice, error

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Code may raise anything; Ctrl-C alone is not its own, nor is a generator's end.
        if error is None or isinstance(error, (EstimatorError, KeyboardInterrupt, GeneratorExit)):
            return
        found = f"{type(error).__name__}: {one_line(_said(error))}".rstrip(": .")
        raise self._error(f"{self._what} ({found}); {self._advice}") from error


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (its own text is code that is not ours either)
        return "it does not say what"


def one_line(text: str, most: int = 200) -> str:
    """The text on one line, cut where it gets long.

    >>> one_line("a\\n  b")
    'a b'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 3] + "..."


_NUMBERS = frozenset((bool, int, float, type(None)))


def unprintable(data: Any) -> str | None:
    """A text in JSON values that would move a terminal's cursor, or None."""
    level = [data]
    while level:
        within: list[Iterable[Any]] = []
        for value in level:
            if isinstance(value, str):
                if not value.isprintable():
                    return value
            elif isinstance(value, (list, tuple)):
                within.append(value)
            elif isinstance(value, Mapping):
                within += value, value.values()
        # Most values are numbers: those go no further.
        level = [
            each for each in itertools.chain.from_iterable(within) if type(each) not in _NUMBERS
        ]
    return None
