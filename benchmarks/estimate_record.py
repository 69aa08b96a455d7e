"""Write down what this tree's package answers, or say how its answers differ from a record's.

``--write FILE`` asks every question; ``--check FILE`` asks them again and ends with 1 if an answer
is another one. Questions are command lines, as a person types them, about small models on machines
of the catalogue and on one that is made up, and tables of many allocations asked for from Python.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from records import Progress, say

_GPT2 = "hf:gpt2,n_layer=3,n_embd=192,n_head=4,vocab_size=2000,n_positions=128 --batch 4"
_LLAMA = (
    "hf:llama,num_hidden_layers=8,hidden_size=256,intermediate_size=640,num_attention_heads=8,"
    "num_key_value_heads=4,vocab_size=3000 --seq-len 128 --batch 2"
)
_EXPERTS = (
    "hf:mixtral,num_hidden_layers=2,hidden_size=128,intermediate_size=256,num_attention_heads=4,"
    "num_key_value_heads=2,num_local_experts=4,vocab_size=1000 --seq-len 64 --batch 2"
)
# What `estimator trace` is told of each graph.
GRAPHS = {
    "gpt2-cpu": f"{_GPT2} --target cpu",
    "gpt2-amp": f"{_GPT2} --precision bf16-amp",
    "gpt2-fp16": f"{_GPT2} --precision fp16-amp --grad-scaler --clip-grad-norm --optimizer lamb",
    "gpt2-compiled": f"{_GPT2} --precision bf16-amp --compile",
    "gpt2-full": f"{_GPT2} --precision bf16-amp --checkpoint full",
    "gpt2-selective": f"{_GPT2} --precision bf16-amp --checkpoint selective:op",
    "llama": f"{_LLAMA} --precision bf16-amp",
    "llama-float8": f"{_LLAMA} --precision bf16 --compile --float8 rowwise",
    "experts": f"{_EXPERTS} --precision bf16-amp",
    "t5": "hf:t5,num_layers=2,d_model=128,d_ff=256,num_heads=4,vocab_size=1000 --batch 2",
}
STRATEGIES = (
    *("ddp", "ddp:unbucketed", "ddp:bucket=64KiB,first=4KiB,view", "zero1", "zero1:unbucketed"),
    *("distributed-optimizer:bucket=1MiB,reduce=fp32", "zero2", "fsdp", "fsdp:shard=2"),
    *("fsdp:no_reshard", "ps:1", "ps:2,bucket=64KiB", "ps:2,async", "local-sgd:every=3"),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb", "zbv", "dualpipev", "dualpipe")
LAYOUTS = (
    *("tp=2", "tp=4,sp,vocab", "tp=4,sp,vocab,megatron", "cp=2", "cp=4,ring", "tp=2,cp=2,pp=2"),
    *(f"pp=4,schedule={schedule},dp=*" for schedule in SCHEDULES),
    *("pp=3,cut=model.layers.2+model.layers.6,dp=*", "tp=2,sp,pp=2,schedule=interleaved:2"),
)
OF_EXPERTS = ("ep=2", "ep=4,imbalance=1.5", "tp=2,ep=2,all-reduce", "ep=2,pp=2", "tp=2,sp,ep=4")
LOADERS = ("sample=110kB,prep=9ms,workers=1,disk=200MB/s,cached=0.35", "prep=2ms")
GPUS = (
    *("1x1:h100-sxm", "2x8:h100-sxm", "4x4:t4-g4dn", "1x2:rtx-3090", "16x8:a100-sxm-80gb"),
    *("2x8:h100-sxm+1x8:a100-sxm-80gb", "1x8:dgx-1+2x4:v100-p3-8xlarge"),
)
CPUS = ("1x1:synthetic", "1x4:synthetic", "2x4:synthetic", "12x3:synthetic")
POLICIES = (
    *("fifo", "srtf", "max-min", "max-min-uncapped", "afs", "optimus", "tiresias", "gavel"),
    *("pollux", "sia", "ones"),
)
_JOBS = {
    "jobs": [
        {
            "name": f"j{number}",
            "arrival_s": 40.0 * number,
            "model": ("gpt2-amp.graph", "llama.graph")[number % 2],
            "samples": 2e5 * (1 + number % 4),
            "devices": 1 + number % 4,
            "global_batch": 32 * (1 + number % 2),
            "most_batch_per_gpu": 16,
            "most_global_batch": 256,
            "gradient_noise_samples": 100.0 * (1 + number),
            "epoch_samples": 2e4,
        }
        for number in range(10)
    ]
}
_SEEN = "workload,allocation,batch_per_gpu,step_time_s,accumulation_steps,strategy,at\n" + "".join(
    f"net,{place},8,{step_s},1,ddp,2026-01-01T0{hour}:00:00Z\n"
    for hour, (place, step_s) in enumerate(
        (("1x1:t4-g4dn", 0.21), ("1x4:t4-g4dn", 0.24), ("2x4:t4-g4dn", 0.35), ("2x4:t4-g4dn", -1))
    )
)
# Two racks of two nodes, the second behind a slower uplink.
_CLUSTER = """
[switches.spine]
[switches.r1]
parent = "spine"
uplink = "100 Gbit/s"
[switches.r2]
parent = "spine"
uplink = "40 Gbit/s"
""" + "".join(
    f'[nodes.{node}]\nmachine = "h100-sxm"\nswitch = "{rack}"\nuplink = "50 Gbit/s"\n'
    for node, rack in (("a1", "r1"), ("a2", "r1"), ("b1", "r2"), ("b2", "r2"))
)
RACKS = ("a1[0,1]+b1[3]", "a1[0,1]+a2[2,3]+b2[0,1,2,3]", "a1[0]+b1[0]+a2[0]+b2[0]")
_TABLE = re.compile(r"table (\S+) (\S+)")
# What a defect may raise; it is written down like a refusal, so that a record is always whole.
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "COLUMNS": "100"}


def questions() -> list[str]:
    """Every question, once, in a fixed order."""
    return list(dict.fromkeys((*_steps(), *_layouts(), *_advice())))


def _steps() -> Iterator[str]:
    for graph, places in (("gpt2-cpu", CPUS), ("gpt2-amp", GPUS), ("llama", GPUS)):
        for strategy in STRATEGIES:
            draw = random.Random(f"{graph} {strategy}")
            for place in draw.sample(places, 2):
                load = draw.choice(("", "--batch 3", "--accumulation 2"))
                yield f"estimate {graph}.graph --on {place} --strategy {strategy} {load} --json"
            yield f"table {graph} {strategy}"
            yield f"memory {graph}.graph --on {places[1]} --strategy {strategy} --json"
            yield f"stalls {graph}.graph --on {places[2]} --strategy {strategy} --json"
        for loader in LOADERS:
            yield f"estimate {graph}.graph --on {places[2]} --loader {loader} --json"
    for graph in GRAPHS:
        for place in (CPUS if graph.endswith("-cpu") else GPUS)[:3]:
            yield f"estimate --verbose {graph}.graph --on {place} --by-module --json"
            yield f"memory {graph}.graph --on {place} --json"
    for place in RACKS:
        for strategy in STRATEGIES[:12:3]:
            asked = f"--on {place} --cluster cluster.toml --strategy {strategy}"
            yield f"estimate gpt2-amp.graph {asked} --json"
    yield "estimate llama.graph --on 2x8:h100-sxm+1x8:a100-sxm-80gb --global-batch 192 --json"
    yield "estimate gpt2-amp.graph --on 1x4:t4-g4dn --batch 4000 --json"


def _layouts() -> Iterator[str]:
    for graph, layouts in (
        ("llama", LAYOUTS),
        ("experts", OF_EXPERTS),
        ("llama-float8", LAYOUTS[:3]),
    ):
        for layout in layouts:
            place = "3x4:t4-g4dn" if "pp=3" in layout else "2x8:h100-sxm"
            asked = f"{graph}.graph --on {place} --layout {layout} --accumulation 8"
            for strategy in ("ddp", "fsdp:no_reshard"):
                yield f"estimate {asked} --strategy {strategy} --json"
            yield f"memory {asked} --json"


def _advice() -> Iterator[str]:
    rented = "--machines t4-g4dn,a100-p4d,h100-p5 --max-nodes 2 --samples 1e8"
    for graph, place in (("gpt2-amp", "1x8:h100-sxm"), ("llama", "2x4:t4-g4dn")):
        yield f"layouts {graph}.graph --on {place} --global-batch 64 --json"
        for more in ("", "--mixed", "--deadline 2h", "--spot --revoked-every 8h"):
            yield f"rent {graph}.graph {rented} {more} --json"
        for pattern in ("1..4x1,2,4:h100-sxm", "1x1:t4-g4dn --batch 1..256"):
            yield f"sweep {graph}.graph --on {pattern} --json"
    for policy in POLICIES:
        yield f"replay jobs.json --on 2x4:gtx-1080-roce+1x4:t4-g4dn --policy {policy} --json"
    yield "calibrate observe seen.csv --store seen.db --json"
    yield "machines compare h100-sxm a100-sxm-80gb --json"
    yield "machines show synthetic --json"


def recorded(is_wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The answer of every wanted question, from two processes that share nothing."""
    names = [name for name in questions() if is_wanted(name)]
    os.environ |= ENVIRONMENT
    with (
        tempfile.TemporaryDirectory(prefix="record-") as folder,
        ProcessPoolExecutor(
            2, mp_context=get_context("spawn"), initializer=_enter, initargs=(folder,)
        ) as pool,
    ):
        progress, answers = Progress("question", len(names)), {}
        for name, answer in zip(names, pool.map(answered, names, chunksize=8), strict=True):
            answers[name] = answer
            progress.done += 1
            if progress.done % 100 == 0:
                say(f"{progress.done} of {len(names)} answers")
    return answers


def _enter(folder: str) -> None:
    """Work in a folder of one's own."""
    from tests.synthetic import Machine

    own = Path(folder, str(os.getpid()))
    own.mkdir()
    os.environ["ESTIMATOR_HOME"] = str(own / "home")
    os.chdir(own)
    Machine().profile().save(own / "home" / "machines" / "synthetic.json")
    Path("jobs.json").write_text(json.dumps(_JOBS), encoding="utf-8")
    Path("seen.csv").write_text(_SEEN, encoding="utf-8")
    Path("cluster.toml").write_text(_CLUSTER, encoding="utf-8")


def answered(name: str) -> Any:
    """What the package answers to a command line, or the columns of a table."""
    needed = ("gpt2-amp", "llama") if name.startswith("replay") else re.findall(r"[\w-]+", name)
    for graph in GRAPHS.keys() & set(needed):
        if not Path(f"{graph}.graph").exists():
            _run(f"trace {GRAPHS[graph]} -o {graph}.graph")
    if asked := _TABLE.fullmatch(name):
        try:
            return plain(_table(*asked.groups()))
        except FAILURES as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    return plain(_run(name))


def _run(line: str) -> dict[str, Any]:
    """The exit code of a command and what it printed."""
    from estimator.cli.main import main

    code: object = 0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code
        except FAILURES as error:
            code = f"{type(error).__name__}: {error}"
    # Of files in the store the whole path is printed.
    text = out.getvalue().replace(os.getcwd(), ".")
    answer = {"code": code, "out": json.loads(text) if text.startswith(("{", "[")) else text}
    # Progress and remarks come with answers too, refusals alone are answers.
    return answer if code in (0, 1) else answer | {"refused": err.getvalue()}


def _table(graph: str, strategy: str) -> Any:
    """Drawn allocations of one to three groups of nodes."""
    import estimator as est

    draw = random.Random(f"{graph} {strategy}")
    machines = {"synthetic": 9} if graph.endswith("-cpu") else {"h100-sxm": 8, "t4-g4dn": 4}
    rows = [
        "+".join(
            f"{draw.choice((1, 2, 5, 40))}x{draw.randint(1, machines[name])}:{name}"
            for name in draw.choices(list(machines), k=draw.randint(1, 3))
        )
        for _ in range(60)
    ]
    batches = [draw.choice((1, 3, 8, 64)) for _ in rows]
    loaded = est.OpGraph.load(f"{graph}.graph")
    return est.estimate_many(loaded, rows, strategy=strategy, batch_per_gpu=batches).to_dict()


def plain(value: Any) -> Any:
    """A value as JSON has it; digits beyond the twelfth are those of the order of additions."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.12g}")
    return value if value is None or isinstance(value, str | int) else str(value)


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_ABSENT = "absent"


class Difference(NamedTuple):
    """A key whose values differ; of two sentences with the same numbers only in their wording."""

    question: str
    key: str
    one: Any
    two: Any
    is_wording: bool = False


def differences(
    one: Mapping[str, Any], two: Mapping[str, Any], *, tolerance: float
) -> Iterator[Difference]:
    """Every key of every question whose answers differ, or that only one of them has."""
    for question in sorted({*one, *two}):
        pair = one.get(question, _ABSENT), two.get(question, _ABSENT)
        for key, first, second in _unequal("", *pair, tolerance, 0.0):
            yield Difference(question, key, first, second, _is_wording(first, second, tolerance))


def _unequal(
    key: str, one: Any, two: Any, tolerance: float, scale: float
) -> Iterator[tuple[str, Any, Any]]:
    """Leaves that differ; parts are compared against the largest of their kind beside them."""
    if isinstance(one, dict) and isinstance(two, dict):
        parts = {name: (one.get(name, _ABSENT), two.get(name, _ABSENT)) for name in {**one, **two}}
        largest: dict[str, float] = {}
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            largest[unit] = max(largest.get(unit, 0.0), *map(_size, pair))
        for name, pair in parts.items():
            unit = name.rpartition("_")[2]
            yield from _unequal(f"{key}.{name}".lstrip("."), *pair, tolerance, largest[unit])
    elif isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            yield f"{key}.length", len(one), len(two)
        for number, pair in enumerate(zip(one, two, strict=False)):
            yield from _unequal(f"{key}.{number}", *pair, tolerance, scale)
    elif isinstance(one, float) and isinstance(two, int | float) and not isinstance(two, bool):
        if not abs(one - two) <= tolerance * max(scale, abs(one), abs(two)) and one == one:
            yield key, one, two
    elif one != two and not (one != one and two != two):
        yield key, one, two


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, float) and abs(value) < float("inf") else 0.0


def _is_wording(one: Any, two: Any, tolerance: float) -> bool:
    if not (isinstance(one, str) and isinstance(two, str) and " " in one and " " in two):
        return False
    numbers = [[float(text) for text in _NUMBER.findall(each)] for each in (one, two)]
    return not [*_unequal("", *numbers, tolerance, 0.0)]


def report(found: list[Difference], *, most: int = 40) -> str:
    """The differences for people: the first of each kind of key, and how many there are."""
    lines = []
    for what, chosen in (
        ("answers", [each for each in found if not each.is_wording]),
        ("wordings", [each for each in found if each.is_wording]),
    ):
        kinds: dict[str, list[Difference]] = {}
        for each in chosen:
            kinds.setdefault(re.sub(r"\.\d+\b", ".*", each.key), []).append(each)
        questions = len({each.question for each in chosen})
        lines.append(f"{len(chosen)} {what} of {questions} questions differ")
        for kind, same in sorted(kinds.items(), key=lambda item: -len(item[1]))[:most]:
            first = same[0]
            lines.append(f"  {kind or 'answer'}: {len(same)}, such as {first.question}")
            lines.append(f"    {first.key}: {str(first.one)[:200]} → {str(first.two)[:200]}")
        if len(kinds) > most:
            lines.append(f"  and {len(kinds) - most} more keys")
    return "\n".join(lines)


def write_record(path: Path, answers: dict[str, Any]) -> None:
    """A line a question, sorted; without a time stamp, so that equal answers are equal files."""
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as stream:
        for name in sorted(answers):
            line = json.dumps([name, answers[name]], sort_keys=True, separators=(",", ":"))
            stream.write(line.encode() + b"\n")


def read_record(path: Path) -> dict[str, Any]:
    """The answers of a file by their questions."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return dict(map(json.loads, stream))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--tolerance", type=float, default=1e-9, help="relative; default 1e-9")
    parser.add_argument("--only", metavar="GLOB", default="*", help="questions by their text")
    options = parser.parse_args(words)
    begun_s = time.monotonic()
    answers = recorded(lambda name: fnmatchcase(name, options.only))
    say(f"{len(answers)} answers in {time.monotonic() - begun_s:.0f} s")
    if options.write:
        write_record(options.write, answers)
        say(f"{options.write}: {options.write.stat().st_size / 1e6:.2f} MB")
        return 0
    kept = {
        name: answer
        for name, answer in read_record(options.check).items()
        if fnmatchcase(name, options.only)
    }
    found = [*differences(kept, answers, tolerance=options.tolerance)]
    print(report(found))
    return int(not kept or any(not each.is_wording for each in found))


if __name__ == "__main__":
    sys.exit(main())
