"""How many examples the longer random tests draw: few in `make test`, many in `make test-all`."""

from __future__ import annotations

from hypothesis import settings


def examples(few: int) -> int:
    """`few`, or as many more as the profile of Hypothesis draws more than its usual hundred."""
    return max(1, few * settings.default.max_examples // 100)
