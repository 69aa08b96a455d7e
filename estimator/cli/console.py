"""Print for people on stdout, objects as JSON, progress and remarks on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from estimator.errors import sentence, spelt_out
from estimator.units import parse_whole

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult

    from estimator.report.sections import Section
    from estimator.report.sections import Table as Content

# Exit codes; 0 is done.
ANSWER_IS_NO, WRONG_INPUT, INTERRUPTED = 1, 2, 130
# Wide enough that tables do not wrap in a file.
WIDTH_OF_FILES = 110
BAR_WIDTH = 32
# What lines of a heading and of a cell do not break within.
_WORD, _INDENTED = re.compile(r"[^\s-]+-?"), re.compile(r"^\s*\S+|\S+")
# What a person waits for without wondering.
_MOMENT_S = 1.0

json_option = click.option("--json", "as_json", is_flag=True, help="Print base units, unrounded.")


def print_sections(sections: Iterable[Section]) -> None:
    """Print for a terminal in its width and colours, else as plain lines; what is empty is not."""
    from rich.console import Console
    from rich.segment import Segments

    is_file = not sys.stdout.isatty()
    width = WIDTH_OF_FILES if is_file else None
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    # Escapes that a cell holds are spelt out before rich adds those of its colours.
    pieces = [
        piece._replace(text=spelt_out(piece.text, lines=True))
        for piece in console.render(rendered(sections))
    ]
    with console.capture() as printed:
        console.print(Segments(pieces), crop=False)
    text = printed.get()
    if is_file:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    click.echo(text, nl=False, color=not is_file)


def rendered(sections: Iterable[Section]) -> Group:
    """Sections as rich draws them, a blank line below each of their parts."""
    from rich.console import Group

    return Group(*(part for section in sections for part in _parts(section)))


def _parts(section: Section) -> Iterator[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    if section.facts:
        facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for row in section.facts:
            facts.add_row(*row)
        if section.title:
            yield Text(section.title, style="bold")
        yield from (facts, Text())
    if section.table and section.table.rows:
        yield from (_Grid(section.title, section.table), Text())
    if section.sentences:
        yield from (*map(Text, section.sentences), Text())
    if section.items:
        items = Table(
            title=section.title,
            title_justify="left",
            box=None,
            show_header=False,
            padding=(0, 1, 0, 0),
        )
        for item in section.items:
            items.add_row("-", item)
        yield from (items, Text())


@dataclass(frozen=True, slots=True)
class _Grid:
    """A table in the width of its console, or as wide as it has to be."""

    title: str
    table: Content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        bars = ["█" * round(ratio * BAR_WIDTH) for ratio in self.table.bars]
        names, count = [*self.table.columns], len(self.table.columns)
        rows = [[*row] for row in self.table.rows]
        if bars:
            names.insert(1, "")
            rows = [[first, bar, *cells] for (first, *cells), bar in zip(rows, bars, strict=True)]
        figures = range(count - self.table.numbers + bool(bars), len(names))
        grid = Table(
            title=self.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        grid.collapse_padding, widths = _fitted(names, rows, figures, options.max_width)
        for index, (name, width) in enumerate(zip(names, widths, strict=True)):
            justify: Literal["left", "right"] = "right" if index in figures else "left"
            heading = "\n".join(textwrap.wrap(name, width))
            grid.add_column(heading, justify=justify, width=width, overflow="fold")
        for first, *cells in rows:
            if not cells:
                grid.add_section()
            grid.add_row(first if cells else Text(first, style="bold"), *cells)
        # A line that is broken by the terminal still has all that stands in it.
        yield from console.render(grid, options.update(width=sum(widths) + 3 * len(widths)))


def _fitted(
    names: Sequence[str], rows: Sequence[Sequence[str]], figures: range, room: int
) -> tuple[bool, list[int]]:
    """Whether columns stand closer together, and their widths, with which they fit if they can.

    First headings break between words, then texts do; figures and single words never.
    """
    from rich.cells import cell_len

    def widest(texts: Iterable[str]) -> int:
        return max(map(cell_len, texts), default=0)

    whole, unbroken, least = list[int](), list[int](), list[int]()
    for index, name in enumerate(names):
        lines = [line for row in rows if index < len(row) for line in row[index].split("\n")]
        heading, unbroken_line = widest(_WORD.findall(name)), widest(lines)
        longest = widest(word for line in lines for word in _INDENTED.findall(line))
        least.append(max(heading, unbroken_line if index in figures else min(longest, room)))
        unbroken.append(max(heading, unbroken_line))
        whole.append(max(cell_len(name), unbroken_line))
    closer = sum(whole) + 3 * (len(names) - 1) > room
    room -= (2 if closer else 3) * (len(names) - 1)
    widths = [min(width, room + floor) for width, floor in zip(whole, least, strict=True)]
    for floors in (unbroken, least):
        while sum(widths) > room:
            wide = [index for index, floor in enumerate(floors) if widths[index] > floor]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
    return closer, widths


def print_text(text: str, *, err: bool = False) -> None:
    """Print lines as they are, what would move a terminal's cursor spelt out."""
    click.echo(spelt_out(text, lines=True).removesuffix("\n"), err=err)


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Let what other code prints stand on stderr: stdout is for our answer alone."""
    try:
        handle = os.dup(2)
    except OSError:  # it is closed
        handle = os.open(os.devnull, os.O_WRONLY)
    # A stream of its own: code may close what it prints to.
    stream = os.fdopen(handle, "w", errors="replace")
    try:
        with contextlib.redirect_stdout(stream):
            yield
    finally:
        with contextlib.suppress(ValueError, OSError):
            stream.close()


def forget_odd_sizes() -> None:
    """Drop sizes of the terminal that rich would fail to read."""
    for name in ("COLUMNS", "LINES"):
        try:
            parse_whole(os.environ.get(name, "1"), least=1, most=99_999)
        except ValueError:
            del os.environ[name]


# Held by what is shown on stderr now: what is under way within it is part of it.
_shown_now = threading.Lock()


@contextlib.contextmanager
def _showing() -> Iterator[bool]:
    """Whether there is a terminal to show on, and nothing is shown there yet."""
    shows = sys.stderr.isatty() and _shown_now.acquire(blocking=False)
    try:
        yield shows
    finally:
        if shows:
            _shown_now.release()


@contextlib.contextmanager
def progress(label: str, *, in_lines: bool = False) -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr, if that is a terminal; the value is told what is under way and how far.

    Elsewhere a line for each part `in_lines`, if asked for, as for a log of many ranks.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with _showing() as shows, Progress(*columns, console=console, disable=not shows) as bar:
        task = bar.add_task(spelt_out(label), total=1.0)
        last = ""

        def report(what: str, done_ratio: float) -> None:
            nonlocal last
            if in_lines and not shows and what != last:
                remark(f"{what}, {done_ratio:.0%} of the time")
            last = what
            bar.update(task, description=spelt_out(f"{label}: {what}"), completed=done_ratio)

        yield report


@contextlib.contextmanager
def waiting(label: str) -> Iterator[None]:
    """Say on stderr what takes time, if that is a terminal and it takes more than a moment."""
    with _showing() as shows:
        if not shows:
            yield
            return
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner, console = Spinner("dots", Text(spelt_out(label))), Console(stderr=True)
        # It begins in the middle of what it is about, where stdout may be another's, closed at its
        # end: not to be put back.
        live = Live(spinner, console=console, transient=True, redirect_stdout=False)
        begin = threading.Timer(_MOMENT_S, live.start)
        begin.start()
        try:
            yield
        finally:
            begin.cancel()
            begin.join()
            live.stop()


def print_json(content: Any) -> None:
    """Print one JSON value on stdout."""
    click.echo(json.dumps(content, indent=1, allow_nan=False))


def print_answer(
    as_json: bool, content: Callable[[], Any], sections: Callable[[], Iterable[Section]]
) -> None:
    """Print an answer as one JSON value, or for people."""
    if as_json:
        print_json(content())
    else:
        print_sections(sections())


def remark(message: str) -> None:
    """Say one line to the person on stderr."""
    click.echo(f"estimator: {sentence(' '.join(message.split()))}", err=True)


def end_with_no(reason: str) -> NoReturn:
    """Say on stderr why the answer is no, and end with the code of that."""
    remark(f"exit code {ANSWER_IS_NO}: {reason}")
    raise click.exceptions.Exit(ANSWER_IS_NO)
