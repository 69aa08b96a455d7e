"""Name how ranks are laid out along the axes of a mesh, in the text that people write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from estimator.errors import StrategyError, quoted
from estimator.workload.strategy import Parallelism, Strategy

_AXES = ("tp", "cp", "ep", "pp", "dp")
_MOST_RANKS = 10**7


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks along each axis; `dp` None takes what the others leave.

    `sequence` divides tokens between the layers that `tp` divides (sequence parallelism),
    `vocabulary` the rows of the embedding, the last layer and its loss.
    """

    tp: int = 1
    dp: int | None = None
    sequence: bool = False
    vocabulary: bool = False

    @property
    def divides_layers(self) -> bool:
        """Whether ranks share a micro-batch's computing."""
        return self.tp > 1

    def __str__(self) -> str:
        parts = [f"tp={self.tp}"] if self.tp > 1 else []
        parts += ["sp"] if self.sequence else []
        parts += ["vocab"] if self.vocabulary else []
        parts.append(f"dp={'*' if self.dp is None else self.dp}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str | Layout) -> Layout:
        """Read ``tp=8,dp=*``, ``tp=2,sp``, ``tp=4,sp,vocab,dp=2``: what is left out is 1.

        Without ``dp`` the rest of the ranks are data-parallel. Raises StrategyError.

        >>> Layout.parse("tp=2,sp,dp=*").parallelism(8, Strategy()).dp
        4
        """
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str):
            raise StrategyError(f"a layout is text such as tp=2,dp=*, found {quoted(text)}")
        return _read(text)

    def parallelism(self, ranks: int, strategy: Strategy, *, micro_batches: int = 1) -> Parallelism:
        """All ranks along the axes; raises StrategyError where these do not multiply to them."""
        dp = ranks // self.tp if self.dp is None else self.dp
        if dp * self.tp != ranks:
            some = f"a multiple of {self.tp}" if self.dp is None else f"{dp * self.tp}"
            raise StrategyError(
                f"layout '{self}' takes {some} ranks, found {ranks}; change an axis or the "
                "allocation"
            )
        shard = strategy.shard or dp if strategy.kind == "fsdp" else None
        data = Parallelism.data_parallel(dp, shard=shard, micro_batches=micro_batches)
        return replace(data, tp=self.tp)


DATA_PARALLEL = Layout()


@lru_cache(maxsize=4096)
def _read(text: str) -> Layout:
    sizes: dict[str, int | None] = {}
    flags = {"sp": False, "vocab": False}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name in flags and not equals:
            flags[name] = True
            continue
        if name not in _AXES or name in sizes or not _is_size(value):
            raise StrategyError(
                f"layout {quoted(text)}: {quoted(part)} is none of {', '.join(_AXES)} with a "
                "number from 1 (one may be *), sp or vocab, each once; write tp=2,dp=*"
            )
        sizes[name] = None if value == "*" else int(value)
    free = [name for name, size in sizes.items() if size is None]
    if free not in ([], ["dp"]):
        raise StrategyError(
            f"layout {quoted(text)}: only dp may be *, found {', '.join(free)}; give a number"
        )
    if missing := [name for name in ("cp", "ep", "pp") if (sizes.get(name) or 1) > 1]:
        raise StrategyError(
            f"layout {quoted(text)}: {missing[0]} cannot be estimated yet; leave it out"
        )
    tp = sizes.get("tp") or 1
    if tp == 1 and any(flags.values()):
        raise StrategyError(
            f"layout {quoted(text)}: sp and vocab divide what tp ranks share; write tp=2 or more"
        )
    return Layout(tp=tp, dp=sizes.get("dp"), sequence=flags["sp"], vocabulary=flags["vocab"])


def _is_size(value: str) -> bool:
    if value == "*":
        return True
    return value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= _MOST_RANKS
