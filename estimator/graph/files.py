"""Save a graph as compressed JSON and load it again; executes nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import numpy as np

from estimator.elementwise import Indices
from estimator.errors import GraphFileError, cause, quoted
from estimator.files import parse_json, read_file, read_start, unpack, write_bytes_atomically
from estimator.graph.costs.call_costs import FUSED, STEP_PART, FusedKernel, StepPart, features_of
from estimator.graph.ir.ops import (
    KINDS,
    Execution,
    GraphColumns,
    GraphInput,
    OpTiming,
    Parameter,
    ValueKind,
)
from estimator.machines.profile import DeviceKind
from estimator.tensors import MOST_EXTENT, OpCall, TensorSpec, decode_tree, encode_tree
from estimator.units import MIB
from estimator.workload.layouts import Layout
from estimator.workload.optimizers import check_optimizer
from estimator.workload.recipe import check_precision
from estimator.workload.strategies import Strategy

if TYPE_CHECKING:
    from estimator.graph.ir.op_graph import OpGraph

Item = TypeVar("Item")

FORMAT = "estimator-graph"
VERSION = 2
# Llama-70B, 20,070 operators, takes 0.2 MiB unpacked; far more than that is not one of ours.
MOST_BYTES = 64 * MIB
# Of a column: the operators of Llama-70B read and make 60,000 values.
_MOST_PLACES = 1 << 20
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
# Columns of operators and of values that stand in a file as they are, flags last.
_OF_OPS = ("call_of", "module_of", "is_forward", "is_repeated", "is_view", "enters_dtensor")
_OF_VALUES = ("touched", "held", "spec_of", "base", "kind")
_COUNTED = ("stem_of", "number", "read", "made", "holds")
# Names of operators, mostly numbered ones.
_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,17})?", re.DOTALL)
# So many changes in a row are compared to find what is repeated, by the periods found most often.
_ALIKE, _MOST_PERIODS = 8, 16
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


def write_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph, whole or not at all; raises StoreError.

    Equal calls are stored once, and so are equal blocks of operators that follow each other.
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


def _encode(graph: OpGraph) -> dict[str, Any]:
    columns = GraphColumns.of(graph)
    calls: dict[OpCall, int] = {}
    specs: dict[TensorSpec, int] = {}
    stems: dict[str, int] = {}
    names = [_NUMBERED.fullmatch(name) for name in columns.names.tolist()]
    parameters = [
        [
            *(p.name, _row(specs, p.spec), p.gradient, p.ready_after),
            *(int(p.is_dtensor), p.optimizer, p.updates),
        ]
        for p in graph.parameters
    ]
    of_ops = {
        **{name: getattr(columns, name) for name in _OF_OPS + _OF_VALUES},
        "stem_of": [_row(stems, name[1]) for name in names if name],
        "number": [int(name[2] or -1) for name in names if name],
        "read": columns.made_begins - columns.begins[:-1],
        "made": columns.begins[1:] - columns.made_begins,
        "holds": np.diff(columns.held_begins),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(graph, name) for name in _PLAIN_FIELDS},
        "assumptions": graph.assumptions,
        "unknown_ops": graph.unknown_ops,
        "versions": dict(graph.versions),
        "columns": {name: packed(np.array(column, int)) for name, column in of_ops.items()},
        "call_pairs": [[_row(calls, one), _row(calls, two)] for one, two in columns.calls],
        "spec_pairs": [[_row(specs, one), _row(specs, two)] for one, two in columns.specs],
        "modules": columns.modules,
        "stems": [*stems],
        "kinds": KINDS,
        "parameters": parameters,
        "inputs": [[i.name, i.value, i.low, i.high] for i in graph.inputs],
        "timings": [
            [_row(calls, call), timing.seconds, timing.noise_ratio]
            for call, timing in graph.timings.items()
        ],
        "calls": [call.encode() for call in calls],
        "specs": [encode_tree(spec) for spec in specs],
        "eager": None if graph.eager is None else _encode(graph.eager),
        "tp_plan": graph.tp_plan,
        "ep_plan": graph.ep_plan,
    }


def packed(column: Indices, least: int = 0) -> list[list[Any]]:
    """A column of whole numbers in parts, of which each is repeated so many times.

    A part is (times, first, step): the numbers of its first time, and by how much each is more the
    next time.

    >>> packed(np.array([7, *range(100), *([3, 4] * 50)]))
    [[1, [7], 0], [100, [0], [1]], [50, [3, 4], [0, 0]]]
    """
    # Of parts that save less than this there are too many.
    least = least or max(len(column) // 64, 16)
    saved, start, period = max(
        (_longest_repeated(column, period) for period in _periods(column)), default=(0, 0, 0)
    )
    if saved < least:
        return [[1, column.tolist(), 0]] if len(column) else []
    times = 2 + saved // period
    first, second = column[start : start + 2 * period].reshape(2, period)
    part = [times, first.tolist(), (second - first).tolist()]
    return [
        *packed(column[:start], least),
        part,
        *packed(column[start + times * period :], least),
    ]


def _periods(column: Indices) -> list[int]:
    """After how many places the changes of a column are often the same for a while."""
    if len(column) <= _ALIKE:
        return []
    changes = np.lib.stride_tricks.sliding_window_view(np.diff(column), _ALIKE)
    # Chance makes two of them equal no matter how: `_longest_repeated` compares every number.
    keys = changes @ (np.arange(1, _ALIKE + 1) ** 5)
    order = np.argsort(keys, kind="stable")
    apart = np.diff(order)[np.diff(keys[order]) == 0]
    periods, counts = np.unique(apart, return_counts=True)
    often: list[int] = periods[np.argsort(-counts, kind="stable")[:_MOST_PERIODS]].tolist()
    return often


def _longest_repeated(column: Indices, period: int) -> tuple[int, int, int]:
    """(numbers that need not stand there, begin, period) of the longest part of such a period."""
    further = column[period:] - column[:-period]
    differs = np.flatnonzero(further[period:] != further[:-period])
    edges = np.concatenate([[-1], differs, [max(len(further) - period, 0)]])
    lengths = np.diff(edges) - 1
    longest = int(lengths.argmax())
    return int(lengths[longest]) // period * period, int(edges[longest]) + 1, period


def unpacked(parts: Sequence[Any]) -> Indices:
    """The inverse of `packed`; raises ValueError where a part is none.

    >>> unpacked([[1, [7], 0], [3, [3, 4], [0, 10]]]).tolist()
    [7, 3, 4, 3, 14, 3, 24]
    """
    if sum(_index(times, _MOST_PLACES) * len(first) for times, first, _ in parts) > _MOST_PLACES:
        raise ValueError("a graph has more operators than any model")
    blocks = [np.zeros(0, dtype=np.intp)]
    for times, *numbers in parts:
        # Of an empty list numpy makes floats.
        first, step = (np.array(each, dtype=None if each else np.intp) for each in numbers)
        are_whole = first.dtype.kind == step.dtype.kind == "i"
        if not are_whole or first.ndim != 1 or step.shape not in ((), first.shape):
            raise ValueError(f"{quoted(numbers)} are no whole numbers to be repeated")
        blocks.append((np.arange(times)[:, None] * step + first).ravel())
    return np.concatenate(blocks)


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
    data: Mapping[str, Any], calls: list[OpCall], specs: list[TensorSpec]
) -> GraphColumns:
    """The operators and values, without making each: large models have ten thousands."""
    of = {name: unpacked(data["columns"][name]) for name in _OF_OPS + _OF_VALUES + _COUNTED}
    stems, modules = (tuple(map(_text, data[name])) for name in ("stems", "modules"))
    kinds = np.array([KINDS.index(_one_of(ValueKind, kind)) for kind in data["kinds"]], np.intp)
    call_pairs, spec_pairs = _pairs(calls, data["call_pairs"]), _pairs(specs, data["spec_pairs"])
    ops, values = len(of["call_of"]), len(of["spec_of"])
    touched, held = len(of["touched"]), len(of["held"])
    # The least of each column, what all are below, how many it has.
    for name, least, end, count in (
        ("call_of", 0, len(call_pairs), ops),
        ("module_of", 0, len(modules), ops),
        ("stem_of", 0, len(stems), ops),
        ("number", -1, MOST_EXTENT, ops),
        *((flag, 0, 2, ops) for flag in _OF_OPS[2:]),
        *((number, 0, touched + 1, ops) for number in ("read", "made")),
        ("holds", 0, held + 1, ops),
        ("touched", 0, values, touched),
        ("held", 0, values, held),
        ("spec_of", 0, len(spec_pairs), values),
        ("base", -1, values, values),
        ("kind", 0, len(kinds), values),
    ):
        column = of[name]
        if len(column) != count:
            raise ValueError(f"'{name}' has {len(column)} places instead of {count}")
        if count and not least <= column.min() <= column.max() < end:
            outside = column[(column < least) | (column >= end)][0]
            raise ValueError(f"index {outside} is outside a table of {end}")
    read, made = of["read"], of["made"]
    tensors = np.array([(len(one.inputs), len(one.outputs)) for one, _ in call_pairs])
    is_other = (tensors.reshape(-1, 2)[of["call_of"]] != np.stack([read, made], axis=1)).any(axis=1)
    names = _names(stems, of["stem_of"], of["number"])
    if is_other.any():
        raise ValueError(f"op {names[int(is_other.argmax())]} names other tensors than its call")
    if (read + made).sum() != touched or of["holds"].sum() != held:
        raise ValueError("ops do not touch or hold as many values as are told")
    places = np.arange(ops)
    is_made = np.tile([False, True], ops)
    flags: Any = {flag: of[flag] > 0 for flag in _OF_OPS[2:]}
    return GraphColumns(
        names=np.array(names, dtype=np.object_),
        calls=call_pairs,
        specs=spec_pairs,
        modules=modules,
        touched_by=np.repeat(places, read + made),
        is_made=np.repeat(is_made, np.stack([read, made], axis=1).ravel()),
        held_by=np.repeat(places, of["holds"]),
        call_of=of["call_of"],
        module_of=of["module_of"],
        spec_of=of["spec_of"],
        touched=of["touched"],
        held=of["held"],
        kind=kinds[of["kind"]],
        base=np.where(of["base"] == np.arange(values), -1, of["base"]),
        **flags,
    )


def _pairs(table: list[Item], rows: Any) -> tuple[tuple[Item, Item], ...]:
    """What stands in a table at each of the places at two batch sizes."""
    pairs = tuple((_at(table, one), _at(table, two)) for one, two in rows)
    for pair in pairs:
        check_alike(*pair)
    return pairs


def _names(stems: Sequence[str], stem_of: Indices, numbers: Indices) -> list[str]:
    """Of operators: stems, most of which are followed by a number."""
    if np.array([0, *map(len, stems)])[stem_of + 1].sum() > MOST_BYTES:
        raise ValueError("the names of its operators are longer than those of any model")
    return [
        stems[stem] if number < 0 else f"{stems[stem]}{number}"
        for stem, number in zip(stem_of.tolist(), numbers.tolist(), strict=True)
    ]


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
