"""Make hostile command lines and their files, of every kind of input that the package takes."""

from __future__ import annotations

import gzip
import json
import os
import random
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from estimator.workload.recipe import PRECISIONS
from tests.fuzz.harmless_inputs import (
    CLUSTER,
    JOB,
    OBSERVED,
    PHILLY,
    PRICES,
    REPLAYED,
    SINFO,
    SIZED_JOB,
    TRACES,
    graph_file,
    graph_values,
    job_file,
    store_bytes,
    whole_profile,
)
from tests.fuzz.hostile_models import FUNCTIONS, MODELS, made_model
from tests.fuzz.hostile_values import damaged_bytes, damaged_text, damaged_values

SAMPLES = Path(__file__).parents[1] / "probe" / "imports" / "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileInput:
    """A command line, what it finds in its folder, and what differs in its environment.

    Beside `files` these are named `pipes` that nobody writes to, and `links` to other places.
    """

    words: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    pipes: tuple[str, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


ESTIMATE = ("estimate", "job.json", "--on", "1x2:local")
KNOBS = (
    *("shard=2", "param=bf16", "reduce=fp32", "no_sync", "no_reshard", "view", "unbucketed"),
    *("link=", "bucket=5MiB", "first=1MiB", "async", "master", "2", "link=10Gbit/s", "reduce="),
    "param=fp64",
)
LOADER = {
    **{"sample": "150kB", "prep": "8ms", "workers": "4", "pinned": "no", "cached": "0.5"},
    **{"stored": "100kB", "cpu": "0.9", "take": "1ms", "disk": "500MB/s", "cores": "2"},
}
POLICIES = ("fifo", "max-min", "srtf", "afs", "optimus", "tiresias", "gavel", "pollux", "ones")
OPTIONS = (
    *("--batch", "--global-batch", "--accumulation", "--seq-len", "--samples", "--tokens"),
    *("--optimizer", "--precision", "--strategy", "--on", "--cluster", "--calibration", "--trace"),
    *("--loader", "--checkpoint"),
)
NUMBERS = (
    *("0", "-1", "1", "8", "1e3", "1e30", "nan", "inf", "-inf", "²", "٣", "0x10", "1_000", " 4"),
    *("9" * 30, "9" * 5000, "1" + "0" * 18, "2.5", "", "1e400", "--", "999999999"),
    *("x" * 3000, "two words " * 500),
)
PIECES = (
    *("1", "2", "x", ":", "local", "+", "[", "]", ",", "0", "-", "h100-sxm", "a1", "²", "٣", " "),
    *("9" * 12, "9" * 5000, "\x1b[31m", "é", "..", "/", "1x1:local", "1x2:local", "bucket="),
    *("25MiB", "ddp", "fsdp", "ps", "zero1", "shard=", "link=", "async", "first=", "10Gbit/s"),
    *("x" * 3000, "two words " * 500),
)


def profile(chance: random.Random) -> HostileInput:
    """A profile with a damage at any depth, shown, compared, merged or estimated with."""
    content = whole_profile().to_dict()
    text = damaged_values(content, chance).encode()
    if chance.random() < 0.15:
        text = damaged_text(json.dumps(content, indent=1), chance)
    name = "store/machines/local.json"
    words = chance.choice(
        (
            ("machines", "show", "local"),
            ("machines", "compare", "local", "h100-sxm"),
            ("machines", "merge", name, name, "--out", "out.json"),
            ("machines", "list"),
            (*ESTIMATE, "--json"),
            ("sweep", "job.json", "--on", "1..2x1..2:local"),
            ("estimate", "whole.graph", "--on", "2x2:local"),
            ("estimate", "job.json", "--verbose", "--on", "1x1:local"),
        )
    )
    job = {**SIZED_JOB, "machine": "local"} if chance.random() < 0.5 else JOB
    files = {name: text, "job.json": json.dumps(job).encode()}
    return HostileInput(words=words, files=files | {"whole.graph": graph_file(graph_values())})


def imports(chance: random.Random) -> HostileInput:
    """A file of another tool, damaged."""
    sample = chance.choice(sorted(SAMPLES.iterdir()))
    text = sample.read_text(errors="replace")
    if sample.suffix == ".json" and chance.random() < 0.7:
        content = damaged_values(json.loads(text), chance).encode()
    else:
        content = damaged_text(text, chance)
    words = chance.choice((("--name", "new"), ("--into", "local"), ("--out", "out.json"), ()))
    return HostileInput(
        words=("machines", "import", sample.name, *words), files={sample.name: content}
    )


def options(chance: random.Random) -> HostileInput:
    """Options with numbers and words that they may not take."""
    words = ["estimate", "job.json", "--on", "1x2:local"]
    for _ in range(chance.choice((1, 1, 2, 3))):
        words += [chance.choice(OPTIONS), chance.choice(NUMBERS)]
    return HostileInput(words=tuple(words), files=job_file())


def allocation(chance: random.Random) -> HostileInput:
    """An allocation, or a sweep's pattern, put together from pieces of allocations."""
    text = "".join(chance.choices(PIECES, k=chance.randrange(1, 9)))
    command = chance.choice(("estimate", "sweep", "memory"))
    return HostileInput(words=(command, "job.json", "--on", text), files=job_file())


def strategy(chance: random.Random) -> HostileInput:
    """A strategy put together from pieces of strategies."""
    kind = chance.choice(("ddp", "zero1", "zero2", "distributed-optimizer", "fsdp", "ps", "ddp2"))
    pieces = (*PIECES, *NUMBERS) if chance.random() < 0.5 else (*KNOBS, *KNOBS, *NUMBERS)
    knobs = ",".join(
        "".join(chance.choices(pieces, k=chance.randrange(1, 4 if pieces[0] == "1" else 2)))
        for _ in range(chance.randrange(1, 4))
    )
    return HostileInput(words=(*ESTIMATE, "--strategy", f"{kind}:{knobs}"), files=job_file())


def loader(chance: random.Random) -> HostileInput:
    """What feeds the ranks, put together from parts with numbers that they may not have."""
    parts = dict(chance.sample(sorted(LOADER.items()), 4)) | {"disk": "500MB/s"}
    parts[chance.choice((*LOADER, "source", "²"))] = chance.choice((*NUMBERS, *LOADER.values()))
    text = chance.choice((",", ",", ",", "")).join(f"{name}={v}" for name, v in parts.items())
    words = chance.choice((ESTIMATE, ("stalls", *ESTIMATE[1:]), ("sweep", *ESTIMATE[1:])))
    return HostileInput(words=(*words, "--loader", text), files=job_file())


def cluster(chance: random.Random) -> HostileInput:
    """A cluster file, damaged."""
    content = damaged_text(CLUSTER, chance)
    if chance.random() < 0.1:
        chain = "".join(f'[switches.s{i}]\nparent = "s{i + 1}"\n' for i in range(3000))
        content = f'{chain}[switches.s3000]\n[nodes.a]\nmachine = "local"\n'.encode()
    on = chance.choice(("2x2:local", "a1[0]+b1[0,1]", "4x1:local"))
    return HostileInput(
        words=("estimate", "job.json", "--on", on, "--cluster", "cluster.toml"),
        files=job_file() | {"cluster.toml": content},
    )


def graph(chance: random.Random) -> HostileInput:
    """A saved graph with a damage at any depth, or with damaged bytes."""
    how = chance.random()
    if how < 0.85:
        content = gzip.compress(damaged_values(graph_values(), chance).encode(), mtime=0)
    elif how < 0.95:
        content = damaged_bytes(graph_file(graph_values()), chance)
    else:
        size = chance.choice((1 << 20, 100 << 20))
        content = gzip.compress(chance.choice((b" ", b"[", b"[],", b'{"a":')) * size, 1, mtime=0)
    more = chance.choice(((), ("--batch", "16"), ("--strategy", "fsdp"), ("--json",)))
    on = chance.choice(("1x1:local", "2x2:local"))
    return HostileInput(
        words=("estimate", "broken.graph", "--on", on, *more), files={"broken.graph": content}
    )


def job(chance: random.Random) -> HostileInput:
    """The summary of a job with a damage at any depth."""
    text = damaged_values(chance.choice((JOB, SIZED_JOB)), chance)
    more = chance.choice(((), ("--batch", "16"), ("--strategy", "fsdp"), ("--json",)))
    return HostileInput(words=(*ESTIMATE, *more), files={"job.json": text.encode()})


def observations(chance: random.Random) -> HostileInput:
    """A table of observed steps with a damaged row, kept, judged or learnt from."""
    rows = [dict(OBSERVED, step_time_s=0.4 + 0.01 * number) for number in range(6)]
    broken = json.loads(damaged_values(rows, chance).replace("9" * 5000, "1"))
    rows = broken if isinstance(broken, list) else rows
    if chance.random() < 0.5:
        name, text = "table.jsonl", "\n".join(json.dumps(row) for row in rows)
    else:
        names = list(OBSERVED)
        listed = [row for row in rows if isinstance(row, dict)]
        lines = [",".join(str(row.get(name, "")) for name in names) for row in listed]
        name, text = "table.csv", "\n".join([",".join(names), *lines])
    content = damaged_text(text, chance) if chance.random() < 0.3 else text.encode()
    words = chance.choice(
        (
            ("calibrate", "observe", name, "--store", "out.db"),
            ("calibrate", "observe", name, "--store", "out.db", "--json"),
        )
    )
    return HostileInput(words=words, files={name: content})


def store(chance: random.Random) -> HostileInput:
    """A store with damaged bytes or altered cells, shown or calibrated with."""
    content = store_bytes()
    if chance.random() < 0.5:
        content = damaged_bytes(content, chance)
    else:
        content = _with_altered_cell(content, chance)
    words = chance.choice(
        (
            ("calibrate", "show", "--store", "seen.db"),
            ("calibrate", "show", "--store", "seen.db", "--json"),
            (*ESTIMATE, "--calibration", "seen.db"),
            ("calibrate", "fit", "job.json", "--store", "seen.db"),
        )
    )
    return HostileInput(words=words, files=job_file() | {"seen.db": content})


def model(chance: random.Random) -> HostileInput:
    """Model code that does what none should."""
    function = chance.choice(FUNCTIONS)
    return HostileInput(
        words=_asked_of(f"model.py:{function}", chance), files={"model.py": MODELS.encode()}
    )


def batch(chance: random.Random) -> HostileInput:
    """A model, a batch or loader, and a loss, of which one may not fit the others."""
    return HostileInput(
        words=_asked_of("model.py:made", chance), files={"model.py": made_model(chance).encode()}
    )


def _asked_of(model: str, chance: random.Random) -> tuple[str, ...]:
    command = chance.choice(("estimate", "estimate", "memory", "stalls"))
    more = chance.choice(
        (
            *((), (), ("--json",), ("--batch", "2"), ("--strategy", "fsdp"), ("--compile",)),
            *(("--precision", chance.choice(PRECISIONS)), ("--clip-grad-norm",)),
            *(("--optimizer", "muon"), ("--optimizer", "adamw-8bit"), ("--loader", "prep=1ms")),
            *(("--checkpoint", form) for form in ("full", "selective:op", "selective:2", "all")),
        )
    )
    return (command, model, "--on", chance.choice(("1x1:local", "2x2:local")), *more)


def memory(chance: random.Random) -> HostileInput:
    """A step's memory asked of a damaged graph or job, under options that it may not take."""
    damaged = chance.random() < 0.6
    values = damaged_values(graph_values(), chance) if damaged else json.dumps(graph_values())
    words = ["memory", chance.choice(("seen.graph", "seen.graph", "seen.graph", "job.json"))]
    words += ["--on", chance.choice(("1x1:local", "2x2:local", "1x1:local+1x2:local"))]
    if not damaged or chance.random() < 0.2:
        numbers = (*NUMBERS, "999999", "123456789012", "4096", "1000000000000000")
        words += [chance.choice(("--batch", "--global-batch", "--accumulation", "--seq-len")),
                  chance.choice(numbers)]  # fmt: skip
        words += ["--strategy", chance.choice(("ddp", "fsdp", "zero1", "zero2", "ps:1"))]
    words += chance.choice(((), ("--json",), ("--picture", "out.svg"), ("--picture", "no/p.json")))
    files = {"seen.graph": gzip.compress(values.encode(), mtime=0), **job_file()}
    return HostileInput(words=tuple(words), files=files)


def replay(chance: random.Random) -> HostileInput:
    """Jobs or a trace of a cluster, damaged, replayed under options that it may not take."""
    name, content = _jobs_file(chance)
    on = chance.choice(("2x2:local", "2x2:local", "1x1:local+1x2:local", "1000x2:local"))
    policy = chance.choice((*POLICIES, *POLICIES, *POLICIES, "json:loads", "builtins:print", ":"))
    words = ["replay", name, "--on", on, "--policy", policy]
    if chance.random() < 0.3:
        words += chance.choice(
            (
                *(("--restart", number) for number in NUMBERS),
                *(("--checkpoint-every", number) for number in NUMBERS),
                *(("--node-mtbf", number) for number in NUMBERS),
                *(("--node-mtbf", "3600"), ("--seed", "²"), ("--believed", "perfect")) * 4,
                *(
                    ("--believed", "calibrated"),
                    ("--on", "a1[0]"),
                    ("--on", ""),
                    ("--model", "none"),
                ),
            )
        )
    if not name.startswith("jobs"):
        words += ["--model", chance.choice(("net.graph", "net.graph", "net.graph", "job.json"))]
    words += chance.choice(((), ("--json",)))
    graph = graph_file(graph_values())
    files = {name: content, "net.graph": graph, **job_file()}
    return HostileInput(words=tuple(words), files=files)


def _jobs_file(chance: random.Random) -> tuple[str, bytes]:
    """A name and content: a list of jobs, or a trace in one of its known forms."""
    if chance.random() < 0.5:
        entries = [dict(REPLAYED, name=f"j{n}", arrival_s=10.0 * n) for n in range(6)]
        text = damaged_values({"jobs": entries}, chance)
        return "jobs.json", text.encode() if chance.random() < 0.9 else damaged_text(text, chance)
    if chance.random() < 0.3:
        jobs = [dict(PHILLY, jobid=f"application_{n}") for n in range(3)]
        return "philly.json", damaged_values(jobs, chance).encode()
    text = chance.choice(TRACES)
    how = _with_cell if chance.random() < 0.2 else damaged_text
    return "trace.csv", how(text, chance)


def environment(chance: random.Random) -> HostileInput:
    """Variables of the environment that lead nowhere or say nothing."""
    names = ("ESTIMATOR_HOME", "COLUMNS", "LINES", "HOME", "XDG_DATA_HOME", "TERM", "RANK", "TZ")
    values = (*NUMBERS, "/dev/null", "/dev/zero", "job.json", "/nowhere/at/all", ".", "\x1b[31m")
    drawn = {chance.choice(names): chance.choice(values) for _ in range(chance.choice((1, 2)))}
    words = chance.choice((ESTIMATE, ("machines", "list"), ("calibrate", "show"), ("--help",)))
    return HostileInput(words=words, files=job_file(), environment=drawn)


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
    *("evil.py:f", "./evil.py:f", "evil:f", "os:getcwd", "builtins:print", "json:loads", "hf:"),
    *("", "hf:nosuchtype", "hf:evil.py:f", "hf:evil.py", "evil.graph", "evil.py", "job.json"),
    *("none.json", "hf:gpt2,n_layer=1,n_layer=2", "hf:../evil", "../net.graph", "/dev/zero"),
    *("net.graph:f", "hf:evil.json", "\x1b[31m.graph", "two words " * 500, "net.graph\x00"),
    "pipe",
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
    *(b"9" * 5000, b"a," * 100_000, b"a,b\n1," + b"x" * 200_000, b'"' + b"x" * 200_000),
    *(b"\x1f\x8b", b"a = " + b"[" * 5000, b"\n" * 100_000, b"x" * (65 << 20)),
    *(b'{"jobs": ' + b"[" * 10_000, b"SQLite format 3\x00" + b"\xff" * 4096, b"<system>" * 5000),
    *(b"- a: &a [*a]\n", b"NaN"),
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
    "profiles": profile,
    "imports": imports,
    "options": options,
    "allocations": allocation,
    "strategies": strategy,
    "loaders": loader,
    "clusters": cluster,
    "graphs": graph,
    "jobs": job,
    "observations": observations,
    "stores": store,
    "model code": model,
    "batches": batch,
    "memory": memory,
    "replays": replay,
    "environment": environment,
    "layouts": layout,
    "schedules": schedule,
    "named code": named_code,
    "prices": prices,
    "sinfo": sinfo,
    "special": special,
}


def _with_altered_cell(content: bytes, chance: random.Random) -> bytes:
    columns = (
        *("identity", "at", "workload", "allocation", "strategy", "batch_per_gpu", "source"),
        *("accumulation_steps", "step_time_s", "steps", "spread_ratio", "revision", "ranks"),
    )
    values = (
        *(-1, 0, 1e308, 1e-308, 2**62, "", "x" * 5000, "\x1b[31m", b"\xff\x00", "nan"),
        *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59+00:00", "9x9:local", "1x1:none"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seen.db"
        path.write_bytes(content)
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            column, value = chance.choice(columns), chance.choice(values)
            statement = chance.choice(
                (
                    f"UPDATE observations SET {column} = ? WHERE number = 1",
                    f"UPDATE OR IGNORE observations SET {column} = ?",
                    "DELETE FROM state WHERE ? IS NOT NULL",
                    "UPDATE workloads SET flops_per_sample = ?",
                )
            )
            connection.execute(statement, (value,))
        except sqlite3.Error:
            pass  # what SQLite refuses nobody writes
        finally:
            connection.close()
        for suffix in ("-wal", "-shm"):
            if os.path.exists(f"{path}{suffix}"):
                os.unlink(f"{path}{suffix}")
        return path.read_bytes()
