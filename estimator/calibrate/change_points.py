"""Find when steps became slower or faster, among the steps of one job in order of time.

The performance model, linearised about its fit, its residuals' Gaussian process and the noise make
one covariance of all steps; level shifts and outliers are columns beside it (Chen and Liu 1993):
all steps from one moment to another take longer, or their synchronisation alone does, or those that
one host takes part in, or a single one is off. Each has a normal prior, the scale of all has an
inverse-gamma one, so that one inverse gives the Bayes factor of every column by cumulative sums.
The best is taken until none is likely. A placement or batch that is seen first may be off by more
than the model knows, and is no change: steps of the same kind before and after one are what shows
it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from estimator.calibrate import design
from estimator.calibrate.design import Inputs
from estimator.calibrate.performance_model import BATCH, LARGEST_NODE, NODES, RANKS, Array

# The names of those that a step runs on, none where its allocation counts machines of a type.
Hosts = frozenset[str]
NO_HOSTS: Hosts = frozenset()
# The least log Bayes factor of a column: its odds beside those of no change, one in a thousand.
_LEAST_LOG_ODDS = 7.0
# What is rarer than a change of all steps for good, in log odds.
_UNLIKELY = 2.0
# Fewer steps may be outliers, each on its own.
_LEAST_STEPS = 3
_MOST_COLUMNS = 16
# Log odds that differ by less are of columns that explain the same.
_ROUNDING = 1e-6
# So many of the latest steps are searched one by one, and so many of those before them, spread
# evenly: the cost is cubic in them.
_MOST_LATEST, _MOST_EARLIER = 80, 80
# Standard deviations of log ratios: of a level, of synchronisation alone, of an outlier.
_LEVEL_SIGMA, _NETWORK_SIGMA, _OUTLIER_SIGMA = 0.4, 0.8, 1.2
# The prior on the variance of all, in units of the model's own: so many errors.
_SCALE_ERRORS = 8.0
# How far the model may be off on one placement, one batch and one kind of step.
_PLACEMENT_SIGMA, _BATCH_SIGMA, _ROW_SIGMA = 0.1, 0.05, 0.05
# How unlike each other jobs are in what one change does to them, as a share of it.
_BETWEEN_JOBS_RATIO = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """From `at` on, in seconds, steps take e^`log_ratio` times as long; `steps` have shown it.

    Where `of_network` is true, their synchronisation does; where `host` is given, those that it
    takes part in do, one of so many `hosts` that were seen. `sigma` is one standard deviation.
    """

    at: float
    log_ratio: float
    sigma: float
    of_network: bool
    steps: int
    host: str | None = None
    hosts: int = 1

    def log_shift(self, network_share: Array) -> Array:
        """By how much it moves the logarithm of steps with such shares of synchronisation."""
        share = network_share if self.of_network else np.ones_like(network_share)
        return np.asarray(self.log_ratio * share)

    def of_another_job(self) -> Change:
        """The same as far as another job on the same machines can know it."""
        sigma = float(np.hypot(self.sigma, _BETWEEN_JOBS_RATIO * self.log_ratio))
        return replace(self, sigma=sigma)

    def place(self, machines: str) -> str:
        """What has changed: a host, machines, their network."""
        return f"the network of {machines}" if self.of_network else self.host or machines

    def sentence(self, machines: str) -> str:
        """Since when which machines are slower or faster, and how many steps have shown it."""
        ratio = (
            f"{np.exp(abs(self.log_ratio)):.2g} × {'slower' if self.log_ratio > 0 else 'faster'}"
        )
        since = f"{datetime.fromtimestamp(self.at, UTC):%A %Y-%m-%d}"
        steps = f"{self.steps} step{'s' if self.steps > 1 else ''}"
        return f"since {since} {ratio} on {self.place(machines)}: {steps}"


class Shown(NamedTuple):
    """What one job has shown of machines: their `changes`, and when each host was last seen."""

    machines: str
    changes: Sequence[Change]
    last_at: float
    hosts: Mapping[str, float]

    @classmethod
    def of(
        cls, machines: str, changes: Sequence[Change], at: Sequence[float], on: Sequence[Hosts]
    ) -> Shown:
        """Of steps seen at such times, on hosts where these are named."""
        hosts: defaultdict[str, float] = defaultdict(lambda: -math.inf)
        for moment, names in zip(at, on, strict=False):
            hosts.update({name: max(hosts[name], moment) for name in names})
        return cls(machines, changes, max(at, default=-math.inf), dict(hosts))


def changes_of(shown: Iterable[Shown], machines: str) -> list[Change]:
    """What other jobs have shown of machines and of hosts, by the one that was seen last there."""
    every, hosts = list(shown), dict[str, tuple[float, Change]]()
    of_type = [
        (one.last_at, sum(change.steps for change in changes), changes)
        for one in every
        if one.machines == machines
        and (changes := [change for change in one.changes if change.host is None])
    ]
    for one in every:
        for change in one.changes:
            if change.host is not None:
                known = one.hosts.get(change.host, change.at), change
                hosts[change.host] = max(hosts.get(change.host, known), known, key=lambda k: k[0])
    _, _, changes = max(of_type, key=lambda known: known[:2], default=(0.0, 0, []))
    return [change.of_another_job() for change in (*changes, *(one for _, one in hosts.values()))]


def level_variance(changes: Sequence[Change], network_share: Array) -> Array:
    """Of the level after changes of all steps, for such shares of synchronisation."""
    found = np.zeros_like(network_share)
    for change in changes:
        if change.host is not None:
            continue
        found += replace(change, log_ratio=change.sigma).log_shift(network_share) ** 2
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Changes:
    """What changed while steps were observed.

    `log_shift` moves each step's logarithm to what it would be today, on hosts that are like the
    others; `unconfirmed` is by how much the last steps are off on their own, which may be the first
    of a change. `changes` still hold; a disturbance that has ended is not among them.
    """

    changes: tuple[Change, ...]
    log_shift: Array
    unconfirmed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps about a fitted model: `residuals` are log(observed / fitted), `at` when each was seen.

    `network_share` is d log(step) / d log(synchronisation), as far as overlap is known.
    `parameters` are standardised by their priors; `hosts` are those that take part in each step,
    where they are named.
    """

    inputs: Inputs
    network_share: Array
    residuals: Array
    parameters: Array
    at: Array
    hosts: Sequence[Hosts] = ()

    def takes_part(self, host: str) -> NDArray[np.bool_]:
        """In which steps a host does."""
        of_steps = self.hosts or [NO_HOSTS] * len(self.at)
        return np.array([host in hosts for hosts in of_steps], dtype=bool)

    def hosts_apart(self) -> dict[str, NDArray[np.bool_]]:
        """The hosts that take part in enough steps, and in other steps than all or one other."""
        names = sorted(frozenset().union(*self.hosts))
        takes_part = {name: self.takes_part(name) for name in names}
        alike = Counter(steps.tobytes() for steps in takes_part.values())
        return {
            name: steps
            for name, steps in takes_part.items()
            if alike[steps.tobytes()] == 1 and steps.sum() >= _LEAST_STEPS and not steps.all()
        }


def no_changes(count: int) -> Changes:
    """Of so many steps."""
    return Changes(changes=(), log_shift=np.zeros(count))


def find_changes(steps: Steps, expected: Sequence[Change] = ()) -> Changes:
    """What changed; `expected` is what other jobs on the same machines have shown."""
    order = np.argsort(steps.at, kind="stable")
    kept = _bounded(order)
    expected = [one for one in expected if _is_seen(one, steps)]
    if len(kept) < _LEAST_STEPS and not expected:
        return no_changes(len(order))
    search = _Search(steps, kept, expected)
    search.run()
    return search.result(steps)


def _is_seen(change: Change, steps: Steps) -> bool:
    """Whether some steps were before a change, or on other hosts, and some after it."""
    if change.host is None:
        return bool(steps.at.min() < change.at <= steps.at.max())
    takes_part = steps.takes_part(change.host)
    return bool((takes_part & (steps.at >= change.at)).any())


def _bounded(order: NDArray[np.intp]) -> NDArray[np.intp]:
    """The latest of steps in order, and some of the others."""
    earlier, latest = order[:-_MOST_LATEST], order[-_MOST_LATEST:]
    return np.concatenate([earlier[:: max(1, -(-len(earlier) // _MOST_EARLIER))], latest])


def _covariance(steps: Steps, kept: NDArray[np.intp]) -> Array:
    """Of the logarithms of steps, about the medians of the priors."""
    inputs = steps.inputs.part(kept)
    rows, covariance = inputs.rows, design.kernel(inputs, inputs)
    for columns, sigma in (
        ([RANKS, NODES, LARGEST_NODE], _PLACEMENT_SIGMA),
        ([BATCH], _BATCH_SIGMA),
        ([*range(rows.shape[1])], _ROW_SIGMA),
    ):
        of = np.unique(rows[:, columns], axis=0, return_inverse=True)[1].reshape(-1)
        covariance += sigma**2 * (of[:, None] == of)
    covariance[np.diag_indices_from(covariance)] += design.noise_variance(inputs.sync_share)
    return np.asarray(covariance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """Steps from `first` to before `end` are off by a value with this prior.

    All of them alike where `kind` is None, by their `_NETWORK` share, or those of a host.
    """

    first: int
    end: int
    kind: str | None
    sigma: float
    mean: float = 0.0
    is_expected: bool = False

    @property
    def is_outlier(self) -> bool:
        """Whether it is of a single step."""
        return self.end - self.first == 1 and not self.is_expected


# No host is called so.
_NETWORK = "*network"


class _Search:
    """Columns that explain steps, in order of time."""

    def __init__(self, steps: Steps, kept: NDArray[np.intp], expected: Sequence[Change]) -> None:
        self.kept, self.columns = kept, list[_Column]()
        self.at = steps.at[kept]
        # By how much a column of each kind moves each step. A host comes before all machines: where
        # both explain the same, one is slower rather than all.
        apart = {name: is_in[kept] for name, is_in in steps.hosts_apart().items()}
        apart |= {one.host: steps.takes_part(one.host)[kept] for one in expected if one.host}
        self.hosts: Mapping[str, NDArray[np.bool_]] = apart
        shape = len(kept) + 1, len(kept) + 1
        self.refused = {name: np.zeros(shape, dtype=bool) for name in (*apart, "")}
        self.share_of: dict[str | None, Array] = {
            **{name: is_in.astype(float) for name, is_in in apart.items()},
            None: np.ones(len(kept)),
            _NETWORK: steps.network_share[kept],
        }
        self.values = (steps.residuals + steps.inputs.jacobian @ steps.parameters)[kept]
        self.inverse = np.linalg.inv(_covariance(steps, kept))
        # A step that was seen at the same moment as the one before it begins nothing.
        self.may_begin = np.append(np.append(False, np.diff(self.at) > 0), True)
        for one in expected:
            first = int(np.searchsorted(self.at, one.at))
            kind = _NETWORK if one.of_network else one.host
            column = _Column(
                first=first, end=len(kept), kind=kind, sigma=one.sigma, mean=one.log_ratio,
                is_expected=True,
            )  # fmt: skip
            if (first or one.host) and first < len(kept):
                self.columns.append(column)

    def run(self) -> None:
        """Take the best column until none is likely, then look again where each begins."""
        self._take_all()
        for column in [one for one in self.columns if not one.is_expected]:
            self.columns.remove(column)
            self._take_all()
        # Where a job's own steps contradict what others have shown, they alone count.
        own = {(one.first, one.end) for one in self.columns if not one.is_expected}
        self.columns = [
            one for one in self.columns if not (one.is_expected and (one.first, one.end) in own)
        ]

    def _take_all(self) -> None:
        while len(self.columns) < _MOST_COLUMNS:
            column = self._best()
            if column is not None:
                self.columns.append(column)
                continue
            weak = next((one for one in self.columns if not self._is_supported(one)), None)
            if weak is None:
                return
            self.refused[self._host(weak.kind) or ""][weak.first, weak.end] = True
            within = range(weak.first, weak.end)
            self.columns = [
                one
                for one in self.columns
                if one is not weak and not (one.is_outlier and one.first in within)
            ]

    def _is_supported(self, column: _Column) -> bool:
        """Whether a level has steps enough that are no outliers."""
        within = set(column.first + np.flatnonzero(self._steps_of(column)))
        outliers = sum(one.is_outlier and one.first in within for one in self.columns)
        return column.is_expected or column.is_outlier or len(within) - outliers >= _LEAST_STEPS

    def _steps_of(self, column: _Column) -> NDArray[np.bool_]:
        """Which of the steps from its first to its end a column is of."""
        is_in = self.hosts.get(column.kind or "", np.ones(len(self.at), dtype=bool))
        return is_in[column.first : column.end]

    def _host(self, kind: str | None) -> str | None:
        return kind if kind in self.hosts else None

    def _matrix(self) -> Array:
        """The columns, each times its prior standard deviation, (steps, columns)."""
        found = np.zeros((len(self.at), len(self.columns)))
        for index, one in enumerate(self.columns):
            within = slice(one.first, one.end)
            found[within, index] = self.share_of[one.kind][within] * one.sigma
        return found

    def _coefficients(self) -> tuple[Array, Array, Array, Array]:
        """Inverse covariance and values without the means, beside all columns; and of these."""
        matrix = self._matrix()
        ratios = np.array([one.mean / one.sigma for one in self.columns])
        values = self.values - matrix @ ratios
        solved = self.inverse @ matrix
        covariance = np.asarray(np.linalg.inv(np.eye(len(ratios)) + matrix.T @ solved))
        inverse = np.asarray(self.inverse - solved @ covariance @ solved.T)
        return inverse, values, covariance, np.asarray(ratios + covariance @ (solved.T @ values))

    def _best(self) -> _Column | None:
        """The most likely column beside those that are taken; None where none is likely."""
        inverse, values, _, _ = self._coefficients()
        solved = inverse @ values
        total = _SCALE_ERRORS + float(values @ solved)
        errors = (_SCALE_ERRORS + len(values)) / 2
        best, log_odds = None, _LEAST_LOG_ODDS
        for kind, share in self.share_of.items():
            is_network = kind == _NETWORK
            sums = np.append(0.0, np.cumsum(share * solved))
            block = np.zeros((len(values) + 1, len(values) + 1))
            block[1:, 1:] = (share[:, None] * inverse * share).cumsum(axis=0).cumsum(axis=1)
            diagonal = np.diag(block)
            explained = (sums[None, :] - sums[:, None]) ** 2
            precision = diagonal[None, :] + diagonal[:, None] - 2 * block
            sigma = np.full_like(precision, _NETWORK_SIGMA if is_network else _LEVEL_SIGMA)
            length = np.subtract.outer(np.arange(len(sums)), np.arange(len(sums))).T
            if kind is None:
                sigma[length == 1] = _OUTLIER_SIGMA
            is_allowed = self._allowed(length, kind)
            gain = explained / (precision + sigma**-2)
            odds = -np.log1p(sigma**2 * np.maximum(precision, 0)) / 2
            odds -= errors * np.log1p(-np.minimum(gain / total, 1 - 1e-12))
            # There are more ways for a disturbance to begin and end than for a change to begin, and
            # where both explain the same, a machine is slower rather than its network alone.
            odds -= _UNLIKELY * ((length > 1) & (np.arange(len(sums)) < len(values)))
            odds -= _UNLIKELY * is_network
            odds[~is_allowed | self.refused[self._host(kind) or ""]] = -np.inf
            place = int(np.argmax(odds))
            if odds.flat[place] > log_odds + _ROUNDING:
                log_odds = float(odds.flat[place])
                first, end = divmod(place, len(sums))
                best = _Column(
                    first=first,
                    end=end,
                    kind=kind,
                    sigma=float(sigma[first, end]),
                )
        return best

    def _allowed(self, length: NDArray[np.intp], kind: str | None) -> NDArray[np.bool_]:
        """Which (first, end) may be a column: single steps, and levels of enough of the others.

        A host may have been slow from its first step on: steps on others show that.
        """
        is_outlier = np.zeros(len(self.at), dtype=np.intp)
        for one in self.columns:
            if one.is_outlier:
                is_outlier[one.first] = 1
        is_host = kind in self.hosts
        counted = np.append(0, np.cumsum((1 - is_outlier) * self.hosts.get(kind or "", 1)))
        enough = counted[None, :] - counted[:, None] >= _LEAST_STEPS
        # Before the first change there are steps that show what it changes.
        known = (counted[:, None] >= min(2, _LEAST_STEPS)) | is_host
        may_begin = self.may_begin.copy()
        may_begin[0] = is_host
        level = enough & known & may_begin[:, None] & may_begin[None, :]
        if kind is not None:
            return np.asarray(level)
        return np.asarray(level | ((length == 1) & (np.append(is_outlier, 1) == 0)[:, None]))

    def result(self, steps: Steps) -> Changes:
        """What the columns say of all steps."""
        _, _, covariance, ratios = self._coefficients()
        log_shift = np.zeros(len(steps.at))
        changes = []
        for index, one in enumerate(self.columns):
            if one.is_outlier:
                continue
            host = self._host(one.kind)
            is_since = steps.at >= self.at[one.first]
            is_on = steps.takes_part(host) if host else np.ones(len(is_since), dtype=bool)
            change = Change(
                at=float(self.at[one.first + int(np.argmax(self._steps_of(one)))]),
                log_ratio=float(ratios[index]) * one.sigma,
                sigma=float(np.sqrt(covariance[index, index])) * one.sigma,
                of_network=one.kind == _NETWORK,
                steps=int((is_since & is_on).sum()),
                host=host,
                hosts=len(frozenset().union(*steps.hosts)) if host else 1,
            )
            by = change.log_shift(steps.network_share)
            if one.end < len(self.at):
                log_shift -= by * (is_since & is_on & (steps.at < self.at[one.end]))
                continue
            changes.append(change)
            log_shift += by * (-1.0 * (is_since & is_on) if host else ~is_since)
        return Changes(
            changes=tuple(sorted(changes, key=lambda change: change.at)),
            log_shift=log_shift,
            unconfirmed=self._unconfirmed(ratios),
        )

    def _unconfirmed(self, ratios: Array) -> float:
        """By how much the last steps are off, if all of them are to the same side."""
        found, place = [0.0], len(self.at) - 1
        off = {
            one.first: float(ratio) * one.sigma
            for one, ratio in zip(self.columns, ratios, strict=True)
            if one.is_outlier
        }
        while place in off and off[place] * found[-1] >= 0:
            found.append(off[place])
            place -= 1
        return max(found, key=abs)
