"""Save a graph as compressed JSON and load it again; executes nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, get_args

from estimator.errors import GraphFileError, cause, quoted
from estimator.files import parse_json, read_file, read_start, unpack, write_bytes_atomically
from estimator.graph.costs.call_costs import FUSED, STEP_PART, FusedKernel, StepPart, features_of
from estimator.graph.ir.ops import (
    Execution,
    GraphColumns,
    GraphInput,
    OpTiming,
    Parameter,
    Phase,
    ValueKind,
)
from estimator.machines.profile import DeviceKind
from estimator.tensors import OpCall, TensorSpec, decode_tree, encode_tree
from estimator.units import MIB
from estimator.workload.layouts import Layout
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision
from estimator.workload.strategies import Strategy

Item = TypeVar("Item")

FORMAT = "estimator-graph"
VERSION = 1
# Llama-70B, 18,800 operators, takes 3 MiB unpacked; far more than that is not one of ours.
MOST_BYTES = 64 * MIB
# Of a parameter in a step: more than any optimizer is called.
_MOST_UPDATES = 1_000_000
_GZIP_MAGIC = b"\x1f\x8b"
# The name is among the first fields, and has at most so many characters.
_HEAD_BYTES, _MOST_NAME = 4 << 10, 500
_NAME = re.compile(rb'"name":\s*("(?:[^"\\]|\\.)*")')
# As they stand in a file: texts, of which some may be None, numbers from and to, and flags.
_TEXTS = ("name", "target", "precision", "optimizer", "execution")
_TEXTS_OR_NONE = ("checkpoint", "float8", "recipe", "layout", "strategy", "timed_on")
_BATCHES = ("batch", "other_batch", "tokens_per_sample")
_COUNTS = ("buffers", "module_calls", "function_calls")
_SIZES = ("frozen_parameter_bytes", "buffer_bytes")
_FLAGS = ("channels_last", "grad_scaler", "clip_grad_norm")
_PLAIN_FIELDS = _TEXTS + _TEXTS_OR_NONE + _BATCHES + _COUNTS + _SIZES + _FLAGS
_DAMAGE = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)
# More of one thing than any model has: they bound what an estimate of a graph takes.
_MOST_BATCH, _MOST_BYTES_HELD, _MOST_COUNT = 10**9, 10**18, 10**9
_LONGEST_S, _MOST_NOISE = 1e9, 100.0


def is_saved_graph(path: str | os.PathLike[str]) -> bool:
    """Whether a path is an existing file that begins as a saved graph does."""
    try:
        return read_start(path, len(_GZIP_MAGIC)) == _GZIP_MAGIC
    except OSError:
        return False


def is_summary_file(text: str) -> bool:
    """Whether a MODEL text names a summary of a job: a JSON file."""
    return text.endswith(".json") and not text.startswith("hf:")


def saved_name(path: str | os.PathLike[str]) -> str:
    """The name in the head of a saved graph, where `write_graph` puts it; else that of the file."""
    try:
        with gzip.open(path) as stream:
            match = _NAME.search(stream.read(_HEAD_BYTES))
        name = json.loads(match[1]) if match else ""
    except (OSError, EOFError, zlib.error, ValueError):
        name = ""
    return name if name and name.isprintable() else Path(path).stem


def write_graph(graph: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the fields of an `OpGraph`, whole or not at all; raises StoreError.

    Equal calls are stored once.
    """
    text = json.dumps(_encode(graph), separators=(",", ":"), allow_nan=False)
    # Without a time stamp, equal graphs give equal files.
    write_bytes_atomically(Path(path), gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read_graph(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields of a saved `OpGraph`; executes nothing from the file.

    Raises GraphFileError if it is missing, damaged or of another version.
    """
    if not isinstance(path, str | os.PathLike):
        raise GraphFileError(f"a graph is loaded from a path, found {quoted(path)}; write one")
    try:
        content = unpack(read_file(path), most_bytes=MOST_BYTES)
        if not content.isascii():  # a character of another kind can take four times the memory
            raise ValueError("not ASCII")
        data = parse_json(content)
    except FileNotFoundError:
        raise GraphFileError(
            f"there is no saved graph {path}; trace the model and save it"
        ) from None
    except OSError as error:
        raise GraphFileError(
            f"cannot read the saved graph {path} ({error.strerror}); trace the model and save it"
        ) from None
    except ValueError as error:
        raise GraphFileError(_damaged(path, error)) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise GraphFileError(f"{path} is not a saved graph; trace the model and save it")
    if data.get("version") != VERSION:
        raise GraphFileError(
            f"{path} has graph format {quoted(data.get('version'))}, this package reads "
            f"{VERSION}; trace "
            "the model again"
        )
    try:
        return _decode(data)
    except _DAMAGE as error:
        raise GraphFileError(_damaged(path, error)) from None


def _damaged(path: str | os.PathLike[str], error: BaseException) -> str:
    return f"{path} is damaged ({cause(error)}); trace the model again and save it"


def _row(table: dict[Any, int], item: Any) -> int:
    """Where an item stands in a table that has equal ones once, in order of first use."""
    return table.setdefault(item, len(table))


def _encode(graph: Mapping[str, Any]) -> dict[str, Any]:
    calls: dict[OpCall, int] = {}
    specs: dict[TensorSpec, int] = {}
    ops = [
        [
            *(op.name, _row(calls, op.call), _row(calls, op.other_call), op.phase, op.module),
            *(op.inputs, op.outputs, int(op.is_view), int(op.is_repeated), op.holds),
            int(op.enters_dtensor),
        ]
        for op in graph["ops"]
    ]
    values = [
        [_row(specs, value.spec), _row(specs, value.other_spec), value.kind, value.base]
        for value in graph["values"]
    ]
    parameters = [
        [
            *(p.name, _row(specs, p.spec), p.gradient, p.ready_after),
            *(int(p.is_dtensor), p.optimizer, p.updates),
        ]
        for p in graph["parameters"]
    ]
    timings = [[_row(calls, c), t.seconds, t.noise_ratio] for c, t in graph["timings"].items()]
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: graph[name] for name in _PLAIN_FIELDS},
        "assumptions": graph["assumptions"],
        "unknown_ops": graph["unknown_ops"],
        "versions": dict(graph["versions"]),
        "ops": ops,
        "values": values,
        "parameters": parameters,
        "inputs": [[i.name, i.value, i.low, i.high] for i in graph["inputs"]],
        "timings": timings,
        "calls": [call.encode() for call in calls],
        "specs": [encode_tree(spec) for spec in specs],
        "eager": None if graph["eager"] is None else _encode(graph["eager"]),
        "tp_plan": graph["tp_plan"],
        "ep_plan": graph["ep_plan"],
    }


def _decode(data: Mapping[str, Any]) -> dict[str, Any]:
    specs = [decode_tree(item) for item in data["specs"]]
    if not all(isinstance(spec, TensorSpec) for spec in specs):
        raise ValueError("a tensor has no shape")
    calls = [_checked_call(OpCall.decode(item)) for item in data["calls"]]
    columns = _decode_columns(data, calls, specs)
    ops, values = columns.ops(), columns.values()
    graph: dict[str, Any] = {
        **{name: data[name] for name in _PLAIN_FIELDS},
        "assumptions": tuple(map(_text, data["assumptions"])),
        "unknown_ops": tuple(map(_text, data["unknown_ops"])),
        "versions": {_text(name): _text(text) for name, text in data["versions"].items()},
        **{
            plan: tuple((_text(name), _text(style)) for name, style in data[plan])
            for plan in ("tp_plan", "ep_plan")
        },
        "ops": ops,
        "values": values,
        "parameters": tuple(
            _decode_parameter(row, specs, len(values), len(ops)) for row in data["parameters"]
        ),
        "inputs": tuple(
            GraphInput(name=_text(name), value=_index(value, len(values)), low=low, high=high)
            for name, value, low, high in data["inputs"]
        ),
        "timings": {
            _at(calls, call): _timing(seconds, spread) for call, seconds, spread in data["timings"]
        },
    }
    _check_plain_fields(graph)
    eager = data["eager"]
    return graph | {"eager": None if eager is None else _decode({**eager, "eager": None})}


def _decode_parameter(row: Any, specs: list[TensorSpec], values: int, ops: int) -> Parameter:
    name, spec, gradient, ready_after, is_dtensor, optimizer, updates = row
    if type(updates) is not int or not 0 <= updates <= _MOST_UPDATES:
        raise ValueError(f"{quoted(updates)} is no number of updates in a step")
    return Parameter(
        name=_text(name),
        spec=_at(specs, spec),
        gradient=_index_or_none(gradient, values),
        ready_after=_index_or_none(ready_after, ops),
        is_dtensor=bool(is_dtensor),
        optimizer=None if optimizer is None else check_optimizer(_text(optimizer)),
        updates=updates,
    )


def _decode_columns(
    data: Mapping[str, Any], calls: Sequence[OpCall], specs: Sequence[TensorSpec]
) -> GraphColumns:
    """The operators and values, without making each: large models have ten thousands."""
    of_ops = tuple(zip(*data["ops"], strict=True)) if data["ops"] else ((),) * 11
    names, call, other, phases, modules, inputs, outputs, views, repeated, holds, enters = of_ops
    of_values = tuple(zip(*data["values"], strict=True)) if data["values"] else ((),) * 4
    spec, other_spec, kinds, bases = of_values
    for text in {*names, *modules}:
        _text(text)
    for allowed, words in ((Phase, {*phases}), (ValueKind, {*kinds})):
        for word in words:
            _one_of(allowed, word)
    _indices(chain.from_iterable((*inputs, *outputs, *holds)), len(kinds))
    _indices([base for base in bases if base is not None], len(kinds))
    columns = GraphColumns.joined(
        names=names,
        calls=_pairs(calls, call, other),
        phases=phases,
        modules=modules,
        inputs=inputs,
        outputs=outputs,
        holds=holds,
        specs=_pairs(specs, spec, other_spec),
        kinds=kinds,
        bases=bases,
        is_repeated=map(bool, repeated),
        is_view=map(bool, views),
        enters_dtensor=map(bool, enters),
    )
    for pair in (*columns.calls, *columns.specs):
        check_alike(*pair)
    tensors = [(len(one.inputs), len(one.outputs)) for one, _ in columns.calls]
    of_op = zip(names, columns.call_of.tolist(), inputs, outputs, strict=True)
    for name, number, read, made in of_op:
        if tensors[number] != (len(read), len(made)):
            raise ValueError(f"op {name} names other tensors than its call")
    return columns


def _pairs(
    table: Sequence[Item], firsts: Iterable[Any], seconds: Iterable[Any]
) -> list[tuple[Item, Item]]:
    """What stands in a table at each of the places at two batch sizes."""
    one, two = (_indices(places, len(table)) for places in (firsts, seconds))
    return [(table[first], table[second]) for first, second in zip(one, two, strict=True)]


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{quoted(value)} is no printable text")
    return value


def check_alike(one: Any, two: Any) -> None:
    """Raise ValueError where a call or an argument at two batch sizes differs in more than size."""
    if one is two or one == two:
        return
    if isinstance(one, OpCall) and isinstance(two, OpCall):
        if one.target != two.target or len(one.keywords) != len(two.keywords):
            raise ValueError(f"{one.target[:60]} is another operator at the second batch")
        for name in ("arguments", "keywords", "outputs"):
            check_alike(getattr(one, name), getattr(two, name))
    elif isinstance(one, TensorSpec) and isinstance(two, TensorSpec):
        if len(one.shape) != len(two.shape) or (one.strides is None) != (two.strides is None):
            raise ValueError("a tensor has other dimensions at the second batch")
        if one.dtype != two.dtype:
            raise ValueError("a tensor has elements of another type at the second batch")
    elif isinstance(one, tuple) and isinstance(two, tuple):
        for first, second in zip(one, two, strict=True):
            check_alike(first, second)
    elif type(one) is not type(two):
        raise ValueError("an argument is of another kind at the second batch")
    elif not isinstance(one, int | float) or isinstance(one, bool):
        raise ValueError("an argument that is no number differs at the second batch")


def _index(value: Any, size: int) -> int:
    if type(value) is not int or not 0 <= value < size:
        raise ValueError(f"index {quoted(value)} is outside a table of {size}")
    return value


def _indices(values: Iterable[Any], size: int) -> Sequence[int]:
    """Places in a table, checked together; raises ValueError."""
    places = [*values]
    if {*map(type, places)} - {int} or (places and not 0 <= min(places) <= max(places) < size):
        for place in places:
            _index(place, size)
    return places


def _index_or_none(value: Any, size: int) -> int | None:
    return None if value is None else _index(value, size)


def _at(table: list[Any], index: Any) -> Any:
    return table[_index(index, len(table))]


def _one_of(kinds: Any, value: Any) -> Any:
    if value not in get_args(kinds):
        raise ValueError(f"{quoted(value)} is none of {', '.join(get_args(kinds))}")
    return value


def _checked_call(call: OpCall) -> OpCall:
    if "." not in call.target:
        raise ValueError(f"{quoted(call.target)} is the name of no operator")
    features_of(call)
    if call.target == STEP_PART:
        StepPart.of(call)
    elif call.target.startswith(FUSED):
        FusedKernel.of(call)
    return call


def _timing(seconds: Any, spread: Any) -> OpTiming:
    if not (0 <= float(seconds) <= _LONGEST_S and 0 <= float(spread) <= _MOST_NOISE):
        raise ValueError(f"an operator takes {quoted(seconds)} s with a noise of {quoted(spread)}")
    return OpTiming(seconds=float(seconds), noise_ratio=float(spread))


def _check_plain_fields(graph: Mapping[str, Any]) -> None:
    for name in _TEXTS + _TEXTS_OR_NONE:
        if graph[name] is not None or name in _TEXTS:
            _text(graph[name])
    if graph["timings"] and graph["timed_on"] is None:
        raise ValueError("it has timings and does not name the machine that they are of")
    if len(graph["name"]) > _MOST_NAME:
        raise ValueError(f"its name has more than {_MOST_NAME} characters")
    if graph["layout"] is not None:
        Layout.parse(graph["layout"])
    if graph["strategy"] is not None:
        Strategy.parse(graph["strategy"])
    check_optimizer(graph["optimizer"])
    check_precision(graph["precision"])
    for names, least, most in (
        (_BATCHES, 1, _MOST_BATCH),
        (_SIZES, 0, _MOST_BYTES_HELD),
        (_COUNTS, 0, _MOST_COUNT),
    ):
        for name in names:
            value = graph[name]
            is_left_out = value is None and names is _BATCHES
            if not is_left_out and (type(value) is not int or not least <= value <= most):
                raise ValueError(f"'{name}' is {quoted(value)}")
    if graph["other_batch"] is not None and graph["other_batch"] == graph["batch"]:
        raise ValueError("the second batch is the first")
    _one_of(DeviceKind, graph["target"])
    _one_of(Execution, graph["execution"])
    for name in _FLAGS:
        if type(graph[name]) is not bool:
            raise ValueError(f"'{name}' is {quoted(graph[name])}")
