"""Say in one sentence what a user's own code raised."""

from __future__ import annotations

from types import TracebackType

from estimator.errors import EstimatorError


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
