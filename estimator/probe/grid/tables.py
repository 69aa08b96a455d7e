"""Turn the families that data/grid.json writes down into calls, at the sizes that it lists."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from estimator.files import shipped_data
from estimator.machines.profile import DeviceKind
from estimator.probe.devices.calls import GridCall, grid_call
from estimator.tensors import TensorSpec

_Size = Mapping[str, int]


@lru_cache(maxsize=1)
def _content() -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(shipped_data("grid.json").read_text(encoding="utf-8"))
    return content


def sizes(name: str, kind: DeviceKind) -> Sequence[Any]:
    """The sizes listed under a name for a kind of device, column by column."""
    listed: Sequence[Any] = _content()["sizes"][name][kind]
    return listed


def families(kind: DeviceKind) -> dict[str, list[GridCall]]:
    """Every family of a kind of device, by name."""
    written = _content()["families"][kind]
    return {
        name: [call for group in groups for call in _calls(group, kind)]
        for name, groups in written.items()
    }


def _calls(group: Mapping[str, Any], kind: DeviceKind) -> Iterator[GridCall]:
    """Every call of a group at every size; what "follows" follows the one before it."""
    columns = _content()["sizes"][group["of"]]["columns"].split()
    rows = enumerate(sizes(group["of"], kind))
    listed = [(number, dict(zip(columns, row, strict=True))) for number, row in rows]
    pairs: Iterable[Any] = product(listed, group["calls"])
    if "operator first" in group:
        pairs = ((size, call) for call, size in product(group["calls"], listed))
    last = None
    for (number, size), (target, *arguments) in pairs:
        given = dict(arguments.pop()) if isinstance(arguments[-1], dict) else {}
        if not _is_wanted(given, number, size):
            continue
        if "index_high" in given:
            given["index_high"] = _number(given["index_high"], size)
        if given.pop("follows", False):
            given["follows"] = last
        tensors = {name: _tensor(text, size) for name, text in group["tensors"].items()}
        last = grid_call(target, *(_argument(each, tensors, size) for each in arguments), **given)
        yield last


def _is_wanted(marks: dict[str, Any], number: int, size: _Size) -> bool:
    """Whether a call is made at this size; takes away the marks that say so."""
    every, wanted = marks.pop("every", (1, 0))
    most, more = (marks.pop(name, {}) for name in ("most", "more"))
    tiles, but = marks.pop("tiles", 1), marks.pop("but", None)
    return (
        number % every == wanted
        and not (but and number % but[0] == but[1])
        and not any(size[column] > highest for column, highest in most.items())
        and not any(size[column] <= lowest for column, lowest in more.items())
        and not any(length % tiles for length in size.values())
    )


def _argument(value: Any, tensors: Mapping[str, TensorSpec], size: _Size) -> Any:
    if isinstance(value, list):
        return [_argument(each, tensors, size) for each in value]
    if isinstance(value, str):
        return _number(value[1:], size) if value[0] == "=" else tensors.get(value, value)
    return value


def _tensor(text: str, size: _Size) -> TensorSpec:
    """A tensor by its dtype, unless that is float32, its lengths, and its strides behind an @.

    >>> _tensor("int64: rows columns/2 @ 1 rows", {"rows": 4, "columns": 6})
    TensorSpec(shape=(4, 3), dtype='int64', strides=(1, 4))
    """
    dtype, _, places = text.rpartition(":")
    lengths, strides = (
        tuple(_number(word, size) for word in part.split()) for part in places.partition("@")[::2]
    )
    return TensorSpec(lengths, dtype or "float32", strides or None)


def _number(text: str, size: _Size) -> int:
    """What columns and numbers come to, from left to right.

    >>> _number("side+1/2*2", {"side": 7})
    8
    """
    first, *words = re.split("([*/+])", text)
    value = size[first] if first in size else int(first)
    for operator, word in zip(words[::2], words[1::2], strict=True):
        number = size[word] if word in size else int(word)
        value = {"*": value * number, "/": value // number, "+": value + number}[operator]
    return value
