"""Make hostile layouts, schedules, jobs, traces, prices, outputs of sinfo, and special files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tests.fuzz.harmless_inputs import (
    PHILLY,
    PRICES,
    REPLAYED,
    SINFO,
    TRACES,
    graph_file,
    graph_values,
    job_file,
)
from tests.fuzz.hostile_inputs import NUMBERS, POLICIES, HostileInput
from tests.fuzz.hostile_values import damaged_text, damaged_values

LAYOUTS = (
    *("tp=2", "cp=2", "ep=2", "pp=2", "dp=2", "dp=*", "tp=*", "sp", "vocab", "megatron", "ring"),
    *("all-reduce", "imbalance=1.2", "schedule=gpipe", "schedule=interleaved:2", "cut=layers.1"),
    *("sp=1", "tp", "xp=2", "imbalance=", "cut=", "cut=+", "cut=" + "a+" * 2000, "imbalance=nan"),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev", "dualpipe", "2f2b", "")
STYLES = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "norm": "sequence_parallel"}
# Whoever imports it writes a file, which is seen.
CODE = b"open('ran', 'w').close()\ndef f(*_):\n    open('ran', 'w').close()\n"
NAMED = (
    *("evil.py:f", "./evil.py:f", "evil:f", "os:getcwd", "builtins:print", "json:loads", "hf:", ""),
    *(
        "hf:nosuchtype",
        "hf:evil.py:f",
        "hf:evil.py",
        "evil.graph",
        "evil.py",
        "job.json",
        "none.json",
    ),
    *("hf:gpt2,n_layer=1,n_layer=2", "hf:../evil", "../net.graph", "/dev/zero", "net.graph:f"),
    *("hf:evil.json", "\x1b[31m.graph", "two words " * 500, "net.graph\x00", "pipe"),
)
NETWORKS = ("1x1:local", "1x2:local", "2x2:local")


def layout(chance: random.Random) -> HostileInput:
    """A layout put together from parts that may contradict each other, or a plan for its layers."""
    parts = chance.choices(LAYOUTS, k=chance.randrange(1, 5))
    if chance.random() < 0.5:
        axis = chance.choice(("tp", "cp", "ep", "pp", "dp", "imbalance", "tp=2,tp"))
        parts.insert(0, f"{axis}={chance.choice((*NUMBERS, '0' * 8 + '1' * 5000, '02', '4'))}")
    words = ["estimate", "net.graph", "--on", chance.choice(NETWORKS), "--layout", ",".join(parts)]
    files = {"net.graph": graph_file(graph_values())}
    if chance.random() < 0.4:
        words[5] = "tp=2"
        words += ["--tp-plan", "plan.json"]
        files["plan.json"] = damaged_values(STYLES, chance).encode()
        if chance.random() < 0.3:
            files["plan.json"] = damaged_text(json.dumps(STYLES, indent=1), chance)
    return HostileInput(words=tuple(words), files=files)


def schedule(chance: random.Random) -> HostileInput:
    """A pipeline of ranks under a schedule that may be none, with batches that may not fit it."""
    name = chance.choice(SCHEDULES)
    if chance.random() < 0.6:
        name += f":{chance.choice((*NUMBERS, '2', '3', '10000', '2:2'))}"
    ranks = chance.choice(("2", "4", "2", *NUMBERS))
    words = ["estimate", "net.graph", "--on", chance.choice(NETWORKS)]
    words += ["--layout", f"pp={ranks},schedule={name}"]
    if chance.random() < 0.5:
        words += ["--accumulation", chance.choice(("2", "4", "100000000", *NUMBERS))]
    return HostileInput(words=tuple(words), files={"net.graph": graph_file(graph_values())})


def named_code(chance: random.Random) -> HostileInput:
    """Jobs that name as their models code, or what is none."""
    entries = [dict(REPLAYED, name=f"j{number}") for number in range(3)]
    entries[chance.randrange(3)]["model"] = chance.choice(NAMED)
    words = ("replay", "jobs.json", "--on", "2x2:local", "--policy", chance.choice(POLICIES))
    files = {
        "jobs.json": json.dumps({"jobs": entries}).encode(),
        "net.graph": graph_file(graph_values()),
        "evil.py": CODE,
        "evil.graph": CODE,
        "evil.json": chance.choice((CODE, b'{"model_type": "evil", "auto_map": {"A": "evil.f"}}')),
    }
    return HostileInput(words=words, files=files | job_file())


def trace(chance: random.Random) -> HostileInput:
    """A trace of a cluster in one of its forms: damaged, long, or with cells beyond measure."""
    how = chance.random()
    if how < 0.3:
        jobs = [dict(PHILLY, jobid=f"application_{number}") for number in range(3)]
        name, content = "trace.json", damaged_values(jobs, chance).encode()
    else:
        text = chance.choice(TRACES)
        name, content = "trace.csv", damaged_text(text, chance)
        if how < 0.5:
            content = _with_cell(text, chance)
    words = ("replay", name, "--on", "2x2:local", "--policy", chance.choice(POLICIES))
    files = {name: content, "net.graph": graph_file(graph_values())}
    return HostileInput(words=(*words, "--model", "net.graph"), files=files)


def prices(chance: random.Random) -> HostileInput:
    """A list of prices, damaged, or with cells beyond measure."""
    content = damaged_text(PRICES, chance)
    if chance.random() < 0.4:
        content = _with_cell(PRICES, chance)
    words = ["rent", "net.graph", "--machines", chance.choice(("local", "local,t4-g4dn", "none"))]
    words += ["--samples", "1e9", "--max-nodes", "1", "--prices", "prices.csv"]
    words += chance.choice(((), ("--spot",), ("--json",), ("--budget", chance.choice(NUMBERS))))
    files = {"prices.csv": content, "net.graph": graph_file(graph_values())}
    return HostileInput(words=tuple(words), files=files)


def sinfo(chance: random.Random) -> HostileInput:
    """What sinfo is said to have printed: damaged, or with names that are options."""
    content = damaged_text(SINFO, chance)
    if chance.random() < 0.6:
        cells = chance.choice(SINFO.splitlines()).split("|")
        cells[chance.randrange(4)] = chance.choice(
            (
                *("gpu --uid=0", "-w", "--wrap=id", "a\x1b[31m", "a\x9bb", "$(id)", "`id`", "a;b"),
                *("a\u202eb", "infinite", "²", "(null)", "gpu:²:4", "gpu:-x:4", "gpu:a b:4"),
                *NUMBERS,
            )
        )
        content = "|".join(cells).encode(errors="surrogatepass") + b"\n" + content
    words = ("slurm", "job.json", "--on", "1x2:local", "--samples", "1000", "--sinfo", "sinfo.txt")
    more = chance.choice(((), ("--json",), ("--run", "train.py \x1b[31m"), ("--run", "a 'b")))
    return HostileInput(words=(*words, *more), files={"sinfo.txt": content, **job_file()})


# Every command that is given a file, by the place of that file.
_TAKING: tuple[tuple[str, ...], ...] = (
    ("estimate", "{}", "--on", "1x1:local"),
    ("estimate", "hf:{}", "--on", "1x1:local"),
    ("estimate", "net.graph", "--on", "1x2:local", "--layout", "tp=2", "--tp-plan", "{}"),
    ("estimate", "net.graph", "--on", "1x2:local", "--cluster", "{}"),
    ("estimate", "net.graph", "--on", "1x2:local", "--calibration", "{}"),
    ("rent", "net.graph", "--machines", "local", "--samples", "9", "--prices", "{}"),
    ("rent", "net.graph", "--machines", "{}", "--samples", "9"),
    ("report", "net.graph", "--on", "1x2:local", "--out", "out.html", "--prices", "{}"),
    ("report", "net.graph", "--on", "1x2:local", "--out", "out.html", "--against", "{}"),
    ("replay", "{}", "--on", "2x2:local", "--policy", "fifo", "--model", "net.graph"),
    ("replay", "{}", "--on", "2x2:local", "--policy", "fifo", "--cluster", "{}"),
    ("slurm", "net.graph", "--on", "1x2:local", "--samples", "9", "--sinfo", "{}"),
    ("machines", "show", "{}"),
    ("machines", "compare", "local", "{}"),
    ("machines", "merge", "{}", "{}", "--out", "out.json"),
    ("machines", "import", "{}", "--name", "new"),
    ("calibrate", "observe", "{}", "--store", "out.db"),
    ("calibrate", "show", "--store", "{}"),
    ("calibrate", "fit", "net.graph", "--store", "{}"),
)
_CONTENTS: tuple[bytes, ...] = (
    *(b"", b"\x00" * 100, b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"{}", b"0"),
    *(
        b"9" * 5000,
        b"a," * 100_000,
        b"a,b\n1," + b"x" * 200_000,
        b'"' + b"x" * 200_000,
        b"\x1f\x8b",
    ),
    *(b"a = " + b"[" * 5000, b"\n" * 100_000, b"x" * (65 << 20), b'{"jobs": ' + b"[" * 10_000),
    *(b"SQLite format 3\x00" + b"\xff" * 4096, b"<system>" * 5000, b"- a: &a [*a]\n", b"NaN"),
)
_ENDINGS = ("", ".json", ".csv", ".jsonl", ".toml", ".graph", ".db", ".xml", ".yaml")
_LINKED = ("/dev/zero", "/dev/null", "/dev/full", "/dev/tty", "/proc/self/mem", "/proc/self/fd/0")


def special(chance: random.Random) -> HostileInput:
    """A file that is a pipe, a device, a folder, a circle of links, or holds what none should."""
    name = f"odd{chance.choice(_ENDINGS)}"
    words = tuple(word.replace("{}", name) for word in chance.choice(_TAKING))
    files = {"net.graph": graph_file(graph_values())}
    how = chance.random()
    if how < 0.2:
        return HostileInput(words=words, files=files, pipes=(name,))
    if how < 0.5:
        to = chance.choice((*_LINKED, ".", name, "missing", "net.graph", "store/machines"))
        return HostileInput(words=words, files=files, links={name: to})
    return HostileInput(words=words, files=files | {name: chance.choice(_CONTENTS)})


def _with_cell(text: str, chance: random.Random) -> bytes:
    """A table with one cell of another kind, one that is too long, or rows without end."""
    rows = [line.split(",") for line in text.splitlines()]
    row = chance.choice(rows)
    row[chance.randrange(len(row))] = chance.choice(
        (*NUMBERS, "x" * 140_000, '"' + "x" * 300_000, "\x1b[31m", "a\x00b", "two words " * 500)
    )
    times = 300_000 if chance.random() < 0.02 else 1
    return "\n".join([*map(",".join, rows), *([",".join(rows[-1])[:60]] * (times - 1))]).encode()


KINDS: dict[str, Callable[[random.Random], HostileInput]] = {
    "layouts": layout,
    "schedules": schedule,
    "named code": named_code,
    "traces": trace,
    "prices": prices,
    "sinfo": sinfo,
    "special": special,
}
