"""Ask the package in two processes that share nothing, and keep its answers as JSON has them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shlex
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from records import Progress

from .questions import command_lines

PROCESSES, AT_ONCE, PART = 2, 8, 200
# What a defect may raise; it is written down like a refusal, so that a record is always whole.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100"}


def recorded(is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The answer of every wanted question by its name."""
    from . import library

    names = [name for name in (*command_lines(), *library.questions()) if is_wanted(name)]
    os.environ |= ENVIRONMENT
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="record-") as folder,
        ProcessPoolExecutor(
            PROCESSES, mp_context=get_context("spawn"), initializer=_enter, initargs=(folder,)
        ) as pool,
    ):
        progress = Progress("question", -(-len(names) // PART))
        for name, answer in zip(names, pool.map(answered, names, chunksize=AT_ONCE), strict=True):
            found[name] = answer
            if len(found) % PART == 0:
                progress.advance(name)
    return found


def _enter(folder: str) -> None:
    """Work in a folder of one's own."""
    from .inputs import write_inputs

    own = Path(folder, str(os.getpid()))
    own.mkdir()
    os.environ["ESTIMATOR_HOME"] = str(own / "home")
    os.chdir(own)
    write_inputs(own)


def answered(name: str) -> Any:
    """What the package answers to a command line, or to a question of `library`."""
    from . import library

    asked = library.questions().get(name)
    if asked is None:
        return _printed(name)
    try:
        return library.plain(asked())
    except FAILURES as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _printed(line: str) -> dict[str, Any]:
    """The exit code of a command, what it printed and the files that it wrote."""
    from estimator.cli.main import main

    from .inputs import need
    from .library import plain

    need(line)
    before, code = set(os.listdir()), 0
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
        except FAILURES as error:
            code = f"{type(error).__name__}: {error}"  # type: ignore[assignment]
    # Of files in the store the whole path is printed.
    text = out.getvalue().replace(os.getcwd(), ".")
    answer = {"code": code, "out": json.loads(text) if text.startswith(("{", "[")) else text}
    # Progress and remarks come with answers too, refusals alone are answers.
    if code not in (0, 1):
        answer["refused"] = err.getvalue()
    written = {name: _content(Path(name)) for name in sorted(set(os.listdir()) - before)}
    return plain(answer | {name: content for name, content in written.items() if content})


def _content(path: Path) -> Any:
    """What a written file says, which is removed."""
    content: Any = None
    if path.suffix == ".json":
        content = json.loads(path.read_text())
    elif path.suffix == ".pickle":
        content = pickle.loads(path.read_bytes())
    elif path.suffix == ".html":
        content = _Words(path.read_text()).words
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return content


class _Words(HTMLParser):
    """Collects the words of a page, without those of its figures."""

    _HIDDEN = ("script", "style", "svg")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self._depth = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._depth += tag in self._HIDDEN

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in self._HIDDEN

    def handle_data(self, data: str) -> None:
        if not self._depth and data.strip():
            self.words.append(" ".join(data.split()))
