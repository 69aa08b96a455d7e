"""Name how ranks are laid out along the axes of a mesh, in the text that people write."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from estimator.errors import StrategyError, quoted
from estimator.units import parse_number, parse_whole
from estimator.workload.knobs import option, options_text, read_options
from estimator.workload.schedules import DEFAULT_SCHEDULE, Schedule
from estimator.workload.strategies import Strategy

_MOST_RANKS = 10**7
_MOST_IMBALANCE = 1e4
_MOST_LAID_OUT = 10**4
_ranks = partial(parse_whole, least=1, most=_MOST_RANKS)


def _imbalance(text: str) -> float:
    ratio = parse_number(text)
    if not 1.0 <= ratio <= _MOST_IMBALANCE:
        raise ValueError(
            f"the tokens of the busiest rank over the mean are from 1 to {_MOST_IMBALANCE:g}, "
            f"found {quoted(text)}"
        )
    return ratio


# What stands in a layout of stages once its repetitions are written out.
_REPEATED = re.compile(r"(?:\(([^()]*)\)|([EtmL]))\*(\d{1,3})")
_LAID_OUT = re.compile(r"[EtmL|]+")


def layers_of(cut: tuple[str, ...]) -> tuple[int, ...]:
    """The layers of each stage of a layout as Megatron-LM writes it; none of modules' names.

    E is the embedding, t a layer, m one that predicts further tokens, L the loss; ``|`` stands
    between stages. Raises ValueError.

    >>> layers_of(("Et*2|(tt|)*2mL",)), layers_of(("layers.4",))
    ((2, 2, 2, 1), ())
    """
    if len(cut) != 1 or "|" not in cut[0]:
        return ()
    text = cut[0]
    while len(text) <= _MOST_LAID_OUT and (match := _REPEATED.search(text)):
        again = (match[1] or match[2] or "") * int(match[3])
        text = text[: match.start()] + again + text[match.end() :]
    stages = [sum(stage.count(kind) for kind in "tm") for stage in text.split("|")]
    if not _LAID_OUT.fullmatch(text) or not all(stages):
        raise ValueError(
            f"{quoted(cut[0])} lays out no stages with layers each; write E, t, m and L, "
            "repetitions as t*4 and (t*4|)*14, and | between stages"
        )
    return tuple(stages)


def _cut(text: str) -> tuple[str, ...]:
    cut = tuple(module.strip() for module in text.split("+"))
    layers_of(cut)
    return cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Ranks along each axis; `dp` None takes what the others leave.

    `sequence` divides tokens between the layers that `tp` divides (sequence parallelism),
    `vocabulary` the rows of the embedding, the last layer and its loss; `tp` and `pp` ranks
    exchange as torch's do, or as those of `megatron`. `cp` ranks share the tokens of every sample;
    keys and values are gathered, or go around a `ring`. `ep` of the data-parallel ranks share the
    experts, the ranks of `tp` among them; tokens go to them by all-to-all, or stay where they are
    and results are summed (`sums_experts`, of ranks that share a batch: ep = tp); the busiest has
    `imbalance` times the mean of tokens. `pp` pipeline ranks hold stages
    of the model, which `schedule` has them compute; they begin at the modules of `cut`, or have the
    layers of the one layout that stands there, ``Et*2|(tt|)*6tL``; by default the slowest takes
    least, or with `megatron` all have as many layers.
    """

    tp: int = option("tp", _ranks, 1, values="8")
    cp: int = option("cp", _ranks, 1, values="2")
    ring: bool = option("ring")
    ep: int = option("ep", _ranks, 1, values="8")
    sums_experts: bool = option("all-reduce")
    imbalance: float = option("imbalance", _imbalance, 1.0, written="{:g}".format, values="1.2")
    pp: int = option("pp", _ranks, 1, values="4")
    schedule: Schedule = option("schedule", Schedule.parse, DEFAULT_SCHEDULE, values="1f1b")
    cut: tuple[str, ...] = option("cut", _cut, (), written="+".join, values="MODULE+MODULE")
    sequence: bool = option("sp")
    vocabulary: bool = option("vocab")
    megatron: bool = option("megatron")
    dp: int | None = option(
        "dp",
        lambda text: None if text == "*" else _ranks(text),
        None,
        written=lambda dp: "*" if dp is None else str(dp),
        values="*",
    )

    @property
    def divides_layers(self) -> bool:
        """Whether ranks share a micro-batch's computing."""
        return self.tp * self.cp * self.ep > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether every rank has batches of its own."""
        return self.tp * self.cp * self.ep * self.pp == 1

    @property
    def of_layers(self) -> Layout:
        """What of the layout divides layers: the ranks that share a micro-batch's computing."""
        return replace(self, pp=1, schedule=DEFAULT_SCHEDULE, cut=(), dp=None)

    @property
    def apart_from_data(self) -> str | None:
        """The layout whatever the number of data-parallel ranks; None where all ranks are such."""
        return None if self.is_data_parallel else str(replace(self, dp=None))

    def __str__(self) -> str:
        if self.pp == 1:
            return options_text(replace(self, schedule=DEFAULT_SCHEDULE), always=("dp",))
        return options_text(self, always=("schedule", "dp"))

    @classmethod
    def parse(cls, text: str | Layout) -> Layout:
        """Read ``tp=8,dp=*``, ``tp=2,sp``, ``tp=4,pp=2,schedule=interleaved:2,dp=2``.

        What is left out is 1, the schedule 1f1b. ``pp=3,cut=layers.10+layers.20`` names the modules
        at which the second stage and those after it begin, ``pp=4,cut=Et*4|(t*5|)*2t*3L`` their
        layers as Megatron-LM's ``--pipeline-model-parallel-layout``. Without ``dp`` the rest of the
        ranks are data-parallel. Raises StrategyError.

        >>> Layout.parse("tp=2,sp,dp=*").data_axes(8, Strategy.parse("fsdp:shard=2"))
        (2, 2)
        """
        if isinstance(text, Layout):
            return text
        if not isinstance(text, str) or not text.strip():
            raise StrategyError(
                f"a layout is text such as tp=2,dp=*, found {quoted(text)}; write one or leave it "
                "out"
            )
        return _read(text)

    def data_axes(self, ranks: int, strategy: Strategy) -> tuple[int, int]:
        """(dp_replicate, dp_shard) of so many ranks; raises StrategyError where none fit."""
        model_ranks = self.tp * self.cp * self.pp
        dp = ranks // model_ranks if self.dp is None else self.dp
        if dp * model_ranks != ranks:
            some = f"a multiple of {model_ranks}" if self.dp is None else f"{dp * model_ranks}"
            raise StrategyError(
                f"layout '{self}' takes {some} ranks, found {ranks}; change an axis or the "
                "allocation"
            )
        shard = (
            self._shard(dp, strategy.shard_ranks) if strategy.keeps.parameters == "shard" else None
        )
        if self.ep > 1:
            # FSDP shards over ranks that have all experts together.
            self._check_experts(dp if shard is None else shard, strategy)
            shard = dp if shard is None else shard
        if dp % (shard or 1):
            raise StrategyError(
                f"'fsdp:shard={shard}' shards over {shard} ranks, which do not divide {dp}; "
                f"choose a divisor of {dp}"
            )
        return dp // (shard or 1), shard or 1

    def _check_experts(self, dp: int, strategy: Strategy) -> None:
        if not strategy.goes_with("ep"):
            raise StrategyError(
                f"layout '{self}' divides experts, which is estimated with ddp and fsdp without "
                f"offload, found '{strategy}'; leave ep or the strategy out"
            )
        shared = dp * self.cp * self.tp
        if shared % self.ep:
            raise StrategyError(
                f"layout '{self}' divides experts over {self.ep} of the {shared} ranks of dp, cp "
                "and tp that hold a model together; choose a divisor"
            )

    def _shard(self, dp: int, shard: int | None) -> int:
        """Of the ranks that FSDP shards over, those with batches of their own."""
        if shard is not None and shard % self.cp:
            raise StrategyError(
                f"'fsdp:shard={shard}' shards over all cp={self.cp} ranks that share samples; "
                f"choose a multiple of {self.cp}"
            )
        return dp if shard is None else shard // self.cp


DATA_PARALLEL = Layout()


@lru_cache(maxsize=4096)
def _read(text: str) -> Layout:
    try:
        given = read_options(Layout, text, "a layout")
        layout = Layout(**given)
        if why := _reason_against(layout, has_schedule="schedule" in given):
            raise ValueError(why)
    except ValueError as error:
        raise StrategyError(f"layout {quoted(text)}: {error}") from None
    return layout


def _reason_against(layout: Layout, *, has_schedule: bool) -> str:
    """What cannot be of a layout; nothing if it can."""
    stages = layout.schedule.model_stages(layout.pp)
    cuts = len(layers_of(layout.cut)[1:] or layout.cut)
    reasons = {
        f"the {stages} stages of {layout.pp} ranks begin at {stages - 1} modules after the first "
        f"stage, found {cuts} in cut": (bool(layout.cut) and cuts != stages - 1),
        f"tp={layout.tp} ranks that share a batch are among those that share experts, found "
        f"ep={layout.ep}; choose a multiple of tp": layout.ep > 1 and layout.ep % layout.tp > 0,
        "all-reduce sums the experts of ranks that share a batch; write ep and tp alike, as in "
        "tp=8,ep=8,all-reduce": layout.sums_experts and not layout.ep == layout.tp > 1,
        "imbalance is that of ranks with experts; write ep=2 or more": (
            layout.ep == 1 and layout.imbalance != 1.0
        ),
        "keys and values of cp ranks go around a ring; write cp=2 or more": (
            layout.cp == 1 and layout.ring
        ),
        "sp and vocab divide what tp ranks share; write tp=2 or more": (
            layout.tp == 1 and (layout.sequence or layout.vocabulary)
        ),
        "megatron is how tp and pp ranks exchange; write tp=2 or pp=2 or more": (
            layout.tp * layout.pp == 1 and layout.megatron
        ),
        "schedule is that of pipeline ranks; write pp=2 or more": layout.pp == 1 and has_schedule,
    }
    return next((why for why, holds in reasons.items() if holds), "")
