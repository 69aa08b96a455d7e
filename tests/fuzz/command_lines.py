"""Give the command line thousands of hostile inputs, and say which of them break its contract.

The contract: a wrong input ends with exit code 2 and one sentence on stderr,
changes no file, and takes bounded time and memory. Each input runs in a forked child of a process
that has everything imported, so that its own time and memory are what is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch

from estimator.cli.main import main as command_line
from tests.fuzz.harmless_inputs import HARMLESS, harmless_files, whole_profile
from tests.fuzz.hostile_inputs import KINDS, HostileInput

# Of a sentence on stderr, however long what it quotes is.
MOST_SAID = 1050
MOST_CPU_S, MOST_RSS_BYTES = 5.0, 1 << 30
# A child that sleeps uses no CPU: the wall clock ends it.
MOST_WALL_S = 60.0
# Files that a command was told to write.
WRITTEN = ("out.json", "out.db", "out.svg", "out.html", "new.json")
# What SQLite keeps there until the process ends, which a forked child does at once.
_BESIDE_A_STORE = ("-wal", "-shm")
CODES = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one input did; `violation` says what of the contract it broke, None if nothing."""

    kind: str
    number: int
    words: tuple[str, ...]
    code: int
    cpu_s: float
    rss_bytes: int
    violation: str | None
    stderr: str


def run_inputs(
    number: int, *, seed: int = 0, kinds: Sequence[str] = (), first: int = 0
) -> Iterator[Outcome]:
    """Run the inputs from `first` to `number`, the kinds in turn; a seed draws the same ones."""
    torch.set_num_threads(1)
    _run_harmless()
    gc.freeze()  # a child copies no page only to count its references
    names = tuple(kinds) or tuple(KINDS)
    with tempfile.TemporaryDirectory(prefix="robustness-") as folder:
        for index in range(first, number):
            kind = names[index % len(names)]
            made = KINDS[kind](random.Random(f"{seed} {kind} {index}"))
            place = Path(folder) / str(index)
            yield _run(kind, index, made, place)


def _run_harmless() -> None:
    """Run a command of each sort here, so that no child has to import what they need."""
    with (
        tempfile.TemporaryDirectory(prefix="robustness-") as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.dict(os.environ, ESTIMATOR_HOME="store"),
    ):
        whole_profile().save("store/machines/local.json")
        for name, content in harmless_files().items():
            Path(name).write_bytes(content)
        for words in HARMLESS:
            with contextlib.suppress(SystemExit):
                command_line(words.split())


@lru_cache(maxsize=1)
def _profile_text() -> str:
    return json.dumps(whole_profile().to_dict())


def _run(kind: str, number: int, made: HostileInput, place: Path) -> Outcome:
    machines = place / "store" / "machines"
    machines.mkdir(parents=True)
    (machines / "local.json").write_text(_profile_text())
    for name, content in made.files.items():
        (place / name).write_bytes(content)
    for name in made.pipes:
        os.mkfifo(place / name)
    for name, target in made.links.items():
        (place / name).symlink_to(target)
    before = _contents(place, made.words)
    out, err = place.with_suffix(".out"), place.with_suffix(".err")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _be_child(made, place, out, err)
    code, usage = _wait(child)
    cpu_s = usage.ru_utime + usage.ru_stime
    printed, said = out.read_text(errors="replace"), err.read_text(errors="replace")
    after = _contents(place, made.words)
    violation = (
        _broken_bound(code, cpu_s, usage.ru_maxrss * 1024)
        or _broken_words(made, code, printed, said)
        or _changed_file(before, after, _meant_to_change(made, code))
    )
    for path in sorted(place.rglob("*"), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in (out, err):
        path.unlink()
    return Outcome(
        kind=kind, number=number, words=made.words, code=code, cpu_s=cpu_s,
        rss_bytes=usage.ru_maxrss * 1024, violation=violation, stderr=said[-1500:],
    )  # fmt: skip


def _be_child(made: HostileInput, place: Path, out: Path, err: Path) -> None:
    """Run the command in this process, and end it."""
    resource.setrlimit(resource.RLIMIT_CPU, (2 * int(MOST_CPU_S), 4 * int(MOST_CPU_S)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for handle, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, handle)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(place)
    sys.dont_write_bytecode = True
    code = 70
    try:
        os.environ["ESTIMATOR_HOME"] = "store"
        for name, value in made.environment.items():
            with contextlib.suppress(ValueError):  # no process can have it
                os.environ[name] = value
        if "TZ" in made.environment:
            time.tzset()
        try:
            command_line(list(made.words))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 71
    except BaseException:  # noqa: BLE001 (whatever it is breaks the contract and is reported)
        import traceback

        os.write(2, traceback.format_exc().encode(errors="replace"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _wait(child: int) -> tuple[int, resource.struct_rusage]:
    end = time.monotonic() + MOST_WALL_S
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status), usage
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            end = float("inf")
        time.sleep(0.002)


def _contents(folder: Path, words: tuple[str, ...]) -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file but those that a command may write."""
    traces = [after for word, after in pairwise(words) if word == "--trace"]
    written = (*WRITTEN, *(Path(name).name for name in traces))
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and path.name not in written
        and not path.name.endswith(_BESIDE_A_STORE)
    }


def _broken_bound(code: int, cpu_s: float, rss_bytes: int) -> str | None:
    if code < 0:
        return f"ended by signal {signal.Signals(-code).name}"
    if cpu_s > MOST_CPU_S:
        return "took more than 5 s of CPU"
    if rss_bytes > MOST_RSS_BYTES:
        return "took more than 1 GiB"
    return None


def _broken_words(made: HostileInput, code: int, printed: str, said: str) -> str | None:
    if "Traceback (most recent call last)" in said or code not in CODES:
        return "a traceback"
    if any(not (c.isprintable() or c in "\n\t") for c in printed + said):
        return "unprintable characters were printed"
    if code == 2:
        lines = [line for line in said.splitlines() if line.startswith("estimator: ")]
        own_code = "model.py" in made.files or "builtins:print" in made.words
        loud = own_code and "calibrate" not in made.words
        if len(lines) != 1 or (not loud and len(said.splitlines()) != 1):
            return "not one sentence on stderr"
        if printed:
            return "a refusal printed on stdout"
        if max(map(len, lines)) > MOST_SAID:
            return "a sentence repeats more than is read"
    elif "--json" in made.words:
        try:
            json.loads(printed)
        except ValueError:
            return "what --json printed is not JSON"
    elif not printed:
        return "nothing was printed"
    return None


def _meant_to_change(made: HostileInput, code: int) -> set[str]:
    """The files that a command was to change and did: an import that came through."""
    into = (after for word, after in pairwise(made.words) if word == "--into")
    return {f"store/machines/{name}.json" for name in into} if code == 0 else set()


def _changed_file(
    before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]], meant: set[str]
) -> str | None:
    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)} - meant
    return f"changed {', '.join(sorted(changed))}" if changed else None


def report(outcomes: Sequence[Outcome]) -> str:
    """A table of kinds with their violations, and the first of each sort of violation."""
    counts = Counter(one.kind for one in outcomes)
    refused = Counter(one.kind for one in outcomes if one.code == 2)
    broken = [one for one in outcomes if one.violation]
    by_kind = Counter(one.kind for one in broken)
    lines = [
        f"{'kind':14}{'inputs':>8}{'refused':>9}{'violations':>12}{'most CPU':>10}{'most':>11}"
    ]
    for kind, count in counts.items():
        ours = [one for one in outcomes if one.kind == kind]
        cpu_s, rss = max(one.cpu_s for one in ours), max(one.rss_bytes for one in ours)
        lines.append(
            f"{kind:14}{count:>8}{refused[kind]:>9}{by_kind[kind]:>12}{cpu_s:>8.1f} s"
            f"{rss / 2**20:>7.0f} MiB"
        )
    lines.append(f"{len(broken)} violations of {len(outcomes)} inputs")
    first: dict[tuple[str, str], Outcome] = {}
    for one in broken:
        first.setdefault((one.kind, one.violation or ""), one)
    for (kind, violation), one in first.items():
        words = " ".join(word[:60] for word in one.words)
        lines += ["", f"{kind} {one.number}: {violation}: {words!r}", one.stderr.strip()]
    return "\n".join(lines)


def _kept(path: Path | None) -> list[Outcome]:
    """The outcomes of an interrupted run, in order."""
    lines = path.read_text().splitlines() if path and path.exists() else []
    return [Outcome(**{**one, "words": tuple(one["words"])}) for one in map(json.loads, lines)]


def main() -> None:
    """Run the inputs and print the table; exit code 1 where the contract was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), default=[])
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--kept", type=Path, help="keep outcomes in FILE, and go on after its last")
    asked = parser.parse_args()
    outcomes = _kept(asked.kept)
    begin = time.monotonic()
    first = len(outcomes)
    for one in run_inputs(asked.inputs, seed=asked.seed, kinds=asked.kind, first=first):
        outcomes.append(one)
        if asked.kept:
            with asked.kept.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
        if len(outcomes) % 100 == 0:
            broken = sum(each.violation is not None for each in outcomes)
            passed = time.monotonic() - begin
            print(f"{len(outcomes)} inputs, {broken} violations, {passed:.0f} s", file=sys.stderr)
    broken = [one for one in outcomes if one.violation]
    if asked.as_json:
        kept = {"inputs": len(outcomes), "violations": [asdict(one) for one in broken]}
        print(json.dumps(kept, indent=1))
    else:
        print(report(outcomes))
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
