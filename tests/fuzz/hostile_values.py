"""Damage JSON values at any depth, and texts at any place, as a seeded generator draws it."""

from __future__ import annotations

import json
import random
from typing import Any

# Stands for a number with more digits than Python reads at once (4,300), until the text is made.
_LONG_NUMBER = "@long number@"
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2.5, -0.0, 1e308, -1e308, 1e-308, 1e200, 1e-200, 5e-324),
    *(float("nan"), float("inf"), float("-inf"), 10**6, 10**9, 10**30, 2**63, -(2**63), 2**64),
    *("", " ", "²", "-1", "1e400", "nan", "x" * 10_000, "\x1b[31mred\x1b[0m", "two\nlines"),
    *("\u202eleft", "\x00", "../../etc", "a[1-9999999]", "1x1:local", _LONG_NUMBER),
    *([], {}, [None], [[]], {"": None}, [1e308] * 3, ["x"], {"t": [3], "d": "float32"}),
    *({"t": [2**62, 2**62], "d": "float32"}, {"t": [-1], "d": 7}, {"f": "nan"}),
)
_MOST_PLACES = 10**6
_WORDS = (
    *("nan", "inf", "-1", "0", "1e308", "²", "9" * 5000, "abc", "\x1b[31m", "\x00", '"', "<", ">"),
    *("[1-9999999]", "[1-9,1-9999999]", "&a", "*a", "!!python/object:os.system", "2026-99-99"),
    *("{", "}", "]", "- ", "\t", "\n", "=", ":", "null", "true", "<!DOCTYPE a>", "999999999999"),
)


def damaged_values(values: Any, chance: random.Random) -> str:
    """A JSON text of the values with one to three of them, at any depth, damaged."""
    copied = json.loads(json.dumps(values))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(_places(copied))
        if places:
            # Repeats of repeats stay within the largest files that are read.
            _damage(*chance.choice(places), chance, most=max(_MOST_PLACES // len(places), 2))
    text = json.dumps(copied)
    return text.replace(f'"{_LONG_NUMBER}"', "9" * 5000)


def altered_values(values: Any, chance: random.Random) -> str:
    """A JSON text of the values with one to three of them in another's place, or a little off."""
    copied = json.loads(json.dumps(values))
    for _ in range(chance.choice((1, 1, 2, 3))):
        # As often in each part: most values stand in the longest list.
        part = chance.choice([key for key in copied if copied[key]])
        whole = chance.random() < 0.2 or not isinstance(copied[part], dict | list)
        inside = [] if whole else list(_places(copied[part]))
        container, key = chance.choice(inside) if inside else (copied, part)
        value = container[key]
        others = [held[k] for held, k in _places(copied) if type(held[k]) is type(value)]
        container[key] = json.loads(json.dumps(chance.choice((*_near(value), *others[:1], None))))
        if others and chance.random() < 0.5:
            container[key] = json.loads(json.dumps(chance.choice(others)))
    return json.dumps(copied)


def _near(value: Any) -> tuple[Any, ...]:
    """Values of the same kind, and some of another."""
    if isinstance(value, bool) or value is None:
        return (not value, 0, 1, "x", 1.5)
    if isinstance(value, int):
        return (value + 1, value - 1, 2 * value, 0, 1, -1, 10**9, 2**31, 2**62, float(value))
    if isinstance(value, float):
        return (0.0, -value, 1e308, 5e-324, 1, {"f": "nan"}, {"f": "inf"})
    if isinstance(value, list):
        return (value[:-1], value[1:], value[::-1], [*value, *value[-1:]], [])
    return ("", "x", 1, [], {})


def _places(values: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value that stands in another, at every depth."""
    found: list[tuple[Any, Any]] = []
    left = [values]
    while left:
        container = left.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                left.append(container[key])
    return found


def _damage(container: Any, key: Any, chance: random.Random, *, most: int) -> None:
    how = chance.random()
    if how < 0.7:
        container[key] = json.loads(json.dumps(chance.choice(_VALUES)))
    elif how < 0.8:
        del container[key]
    elif how < 0.85 and isinstance(container, list):
        container[:] = [container[key]] * min(chance.choice((2, 100, 20_000)), most)
    elif how < 0.9 and isinstance(container, list):
        chance.shuffle(container)
    elif how < 0.95 and isinstance(container, dict):
        container[str(chance.choice(_WORDS))] = container[key]
    else:
        deep: Any = container[key]
        for _ in range(chance.choice((1, 50, 200))):
            deep = [deep]
        container[key] = deep


def damaged_text(text: str, chance: random.Random) -> bytes:
    """A text with one to four damages: words in place of others, lines gone or twice, bytes."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        text = _damaged_once(text, chance)
    content = text.encode(errors="surrogatepass")
    if chance.random() < 0.1 and content:
        place = chance.randrange(len(content))
        content = content[:place] + chance.randbytes(chance.choice((1, 8))) + content[place + 1 :]
    return content


def _damaged_once(text: str, chance: random.Random) -> str:
    how, place = chance.random(), chance.randrange(len(text) + 1)
    if how < 0.5:
        # A whole word or number becomes another.
        first = last = place
        while first > 0 and text[first - 1].isalnum():
            first -= 1
        while last < len(text) and text[last].isalnum():
            last += 1
        return text[:first] + chance.choice(_WORDS) + text[last:]
    if how < 0.6:
        return text[:place] + chance.choice(_WORDS) + text[place:]
    if how < 0.7:
        return text[:place]
    lines = text.splitlines(keepends=True)
    if not lines:
        return chance.choice(_WORDS)
    number = chance.randrange(len(lines))
    if how < 0.8:
        return "".join(lines[:number] + lines[number + 1 :])
    if how < 0.9:
        return "".join(lines[:number] + [lines[number]] * 2 + lines[number:])
    if how < 0.95:
        chance.shuffle(lines)
        return "".join(lines)
    return text * chance.choice((2, 50))


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes cut off, or some of them altered."""
    if chance.random() < 0.2:
        return content[: chance.randrange(len(content) + 1)]
    altered = bytearray(content)
    for _ in range(chance.choice((1, 4, 32))):
        altered[chance.randrange(chance.choice((min(100, len(altered)), len(altered))))] = (
            chance.randrange(256)
        )
    return bytes(altered)
