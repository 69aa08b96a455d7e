"""Correct estimates by the steps observed so far, and compare those with what was predicted."""

from __future__ import annotations

import logging
import os
import statistics
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from estimator.calibrate.observed import Observation, ObservedWorkload, hosts_of
from estimator.calibrate.store import ObservationStore, opened
from estimator.coefficients import (
    UNCALIBRATED,
    Coefficients,
    JobContent,
    PredictedStep,
    StepPredictor,
    StepQuestion,
)
from estimator.errors import EstimatorError, ObservationError, printable
from estimator.estimates.engine import DEFAULT
from estimator.estimates.request import EstimateRequest
from estimator.graph.files import is_saved_graph
from estimator.graph.ir.op_graph import OpGraph, workload_name
from estimator.placement.allocation import Allocation
from estimator.placement.topology import Cluster

if TYPE_CHECKING:
    from estimator.calibrate.change_points import Change, Shown
    from estimator.calibrate.corrections import StepCorrections


logger = logging.getLogger(__name__)

_MOST_ANSWERS = 100_000
# Fewer steps of a job cannot show a change.
_LATEST = 3
# Pooling is cubic in the jobs that teach, and those less alike say little more.
_MOST_TEACHERS = 16
_Asked = tuple[str, int, int, str, str | None]
# Names of machine types, and how ranks share the model.
_Place = tuple[str, str | None]


class Calibrator:
    """Observed steps, and what they teach of each workload and each cluster.

    ``estimate(graph, allocation, calibration=calibrator)`` gives the calibrated answer. Nothing is
    learnt of a job before it is asked for with its graph; `fit` takes in what any process has
    observed since. Without observations an estimate is the engine's own. One calibrator goes with
    one cluster; after its machines were probed again, make a new one. Any number of threads may
    estimate while one fits: each answer is that of before the fit or of after it.

    A job is what its graph computes, not its name; other jobs move its answer within the engine's
    own interval only. What was observed of a name alone (a table's, an older store's) counts as
    observed of a graph of that name, and the answer says so, unless their parameters differ.

    `store` is an ObservationStore, a path, or None for the user's store. Steps from before the
    machines became slower or faster count as they would be today. Raises StoreError where the store
    cannot be used.

    >>> import estimator as est, tempfile, torch
    >>> graph = est.trace_model(torch.nn.Linear(8, 8), torch.randn(4, 8), target="cuda")
    >>> calibrator = Calibrator(tempfile.mkdtemp() + "/observations.db")
    >>> for step_time_s in (0.010, 0.011, 0.010):
    ...     calibrator.observe(graph, "1x4:t4-g4dn", step_time_s=step_time_s, batch_per_gpu=4)
    >>> _ = calibrator.fit()
    >>> round(est.estimate(graph, "1x4:t4-g4dn", calibration=calibrator).step_time_s, 3)
    0.01
    """

    def __init__(self, store: ObservationStore | str | os.PathLike[str] | None = None) -> None:
        self.store = opened(store)
        self._fitted = _Fitted(self.store)
        self._learning = threading.Lock()

    def observe(
        self,
        workload: str | ObservedWorkload | OpGraph,
        allocation: str | Allocation,
        *,
        step_time_s: float,
        batch_per_gpu: int,
        **details: Any,
    ) -> None:
        """Keep one observed step time; `details` are further fields of `Observation`.

        Counts for estimates after the next `fit`. Raises ObservationError, StoreError.
        """
        summary = ObservedWorkload.of(workload)
        observation = Observation(
            workload=summary.name,
            fingerprint=summary.fingerprint,
            allocation=str(allocation),
            step_time_s=step_time_s,
            batch_per_gpu=batch_per_gpu,
            **details,
        )
        self.store.add_many([observation], summaries=[summary])

    def fit(self) -> Calibrator:
        """Learn from what was observed since the last fit, of every workload asked for so far."""
        with self._learning:
            seen = dict(self._fitted.seen)
            # Read first: what comes in between is read again rather than missed.
            revision = self.store.revision
            changed = [known for known in self._read(revision) if known is not seen[known.job]]
            seen |= {known.job: known for known in changed}
            # Those seen most teach first.
            for known in sorted(changed, key=lambda job: -len(job.observations)):
                self._fit_job(seen, known)
            self._fitted = _Fitted(self.store, seen, revision)
        return self

    def _fit_job(self, seen: dict[str, _JobObservations], known: _JobObservations) -> None:
        shown = _shown_by_others(self.store, seen, known)
        seen[known.job] = known.fit(_others(seen, known), shown)

    def _read(self, revision: int) -> list[_JobObservations]:
        """Every job with what was observed of it since; the same object where nothing was."""
        jobs = self._fitted.seen.values()
        new = self.store.observations(added_after=self._fitted.revision) if jobs else []
        names = {one.fingerprint for one in new} | {one.workload for one in new}
        return [
            job.read(self.store, revision)
            # What is known of a name may have changed although no step was observed.
            if not new or not names.isdisjoint((job.content.fingerprint, job.workload))
            else job
            for job in jobs
        ]

    @property
    def state(self) -> object:
        """What was learnt so far: another object after each time that something was."""
        return self._fitted

    def coefficients_for(
        self,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
        engine: StepPredictor,
    ) -> list[Coefficients]:
        """The factors for each step; see `coefficients.Calibration`."""
        if not questions:
            return []
        first = questions[0]
        fitted = self._knowing(first.job, first.workload, engine)
        return fitted.coefficients_for(engine, questions, allocations)

    def counting_drifts(
        self, cluster: Cluster, *, hosts: Collection[str] | None = None
    ) -> tuple[Cluster, list[str]]:
        """The cluster with its hosts as slow as observations of all jobs show them, and a sentence
        on each; of `hosts` alone where they are given.

        Estimates count what a job's own steps or those of others show of a host without it; a
        cluster that says so also has batches shared by speed. Hosts with a slowdown of their own
        keep that.
        """
        from estimator.calibrate.review import counting_drifts

        names = cluster.nodes.keys() if hosts is None else hosts
        return counting_drifts(cluster, names, self.store.observations())

    def _knowing(self, job: str, workload: str, engine: StepPredictor) -> _Fitted:
        """What was learnt so far, of a job too."""
        # Read once: a fit that ends meanwhile puts another in its place.
        fitted = self._fitted
        if fitted.knows(job, engine):
            return fitted
        with self._learning:
            if not self._fitted.knows(job, engine):
                seen = dict(self._fitted.seen)
                new = _JobObservations(job=job, workload=workload, engine=engine, key=engine.key)
                self._fit_job(seen, new.read(self.store, self.store.revision))
                self._fitted = _Fitted(self.store, seen, self._fitted.revision)
            return self._fitted


def _others(seen: Mapping[str, _JobObservations], known: _JobObservations) -> list[StepCorrections]:
    """What was learnt of other jobs by their own observations, of those most alike first."""
    others = (other for other in seen.values() if other.job != known.job and other.fitted)
    alike = sorted(others, key=lambda other: -known.content.likeness(other.content))
    return [fitted for other in alike for fitted in other.fitted.values()]


def _shown_by_others(
    store: ObservationStore, seen: Mapping[str, _JobObservations], known: _JobObservations
) -> list[Shown]:
    """What other jobs, of a graph that is at hand or not, show of machines since a job was there.

    Its own last steps cannot show by themselves what has changed since.
    """
    shown = [fitted.shown_ for fitted in _others(seen, known)]
    if not known.observations:
        return shown
    from estimator.calibrate.review import shown_by_others

    latest = sorted(one.at for one, _ in known.observations)[-_LATEST:]
    at_hand = {("content", job) for job in seen}
    return shown + shown_by_others(
        store, since=latest[0], known=at_hand | {("content", known.job), ("name", known.workload)}
    )


class _Fitted:
    """What all jobs have taught by some moment, and the answers given by that.

    All jobs have taken in what the store held at `revision`, those learnt of since then more.
    """

    def __init__(
        self,
        store: ObservationStore,
        seen: Mapping[str, _JobObservations] | None = None,
        revision: int = 0,
    ) -> None:
        self.store, self.revision = store, revision
        self.seen: Mapping[str, _JobObservations] = seen or {}
        self._answers: OrderedDict[StepQuestion, Coefficients] = OrderedDict()
        self._writing = threading.Lock()
        # Worked out when they are asked for: there may be many jobs that wait.
        self.hosts_apart = cache(self._hosts_apart)
        self._later_changes = cache(self._changes_by_others)
        self._shown = cache(partial(_shown_by_others, store, self.seen))
        self._unobserved = cache(self._by_others)

    def knows(self, job: str, engine: StepPredictor) -> bool:
        """Whether the job was learnt of with an engine that answers like this one."""
        seen = self.seen.get(job)
        return seen is not None and seen.key == engine.key

    def coefficients_for(
        self,
        engine: StepPredictor,
        questions: Sequence[StepQuestion],
        allocations: Sequence[Allocation],
    ) -> list[Coefficients]:
        """The factors for steps of a job that is known."""
        job = questions[0].job
        if self.hosts_apart(job):
            questions = [
                question._replace(hosts=hosts_of(allocation))
                for question, allocation in zip(questions, allocations, strict=True)
            ]
        known = [self._answers.get(question) for question in questions]
        fresh = [answer for answer in known if answer is not None]
        if len(fresh) == len(questions):
            return fresh
        new = {
            question: where
            for question, where, answer in zip(questions, allocations, known, strict=True)
            if answer is None
        }
        answers = dict(self._answered(self.seen[job], engine, new))
        with self._writing:
            self._answers.update(answers)
            while len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)
        return [answer or answers[q] for answer, q in zip(known, questions, strict=True)]

    def _answered(
        self,
        job: _JobObservations,
        engine: StepPredictor,
        places: Mapping[StepQuestion, Allocation],
    ) -> Iterator[tuple[StepQuestion, Coefficients]]:
        """The factors for steps that are asked, by the corrections of their machine types."""
        by_place: defaultdict[_Place, dict[StepQuestion, Allocation]] = defaultdict(dict)
        for question, allocation in places.items():
            by_place[question.machines, question.layout][question] = allocation
        for place, questions in by_place.items():
            corrections = job.fitted.get(place) or self._unobserved(job, place)
            if corrections is None:
                yield from ((question, UNCALIBRATED) for question in questions)
            else:
                later = self._later_changes(job, place[0])
                yield from _answers(engine, questions, corrections, later)

    def _hosts_apart(self, job: str) -> frozenset[str]:
        """The hosts that are unlike others of their type, by a job itself or by others."""
        known = self.seen[job]
        changes = [one for fitted in known.fitted.values() for one in fitted.shown_.changes]
        changes += self._later_changes(known, "")
        return frozenset([change.host for change in changes if change.host is not None])

    def _changes_by_others(self, job: _JobObservations, machines: str) -> list[Change]:
        """What other jobs have shown of machines, and of hosts that the cluster says nothing of."""
        from estimator.calibrate.change_points import changes_of

        changes = changes_of(self._shown(job), machines)
        return [one for one in changes if one.host not in job.engine.slowed_hosts]

    def _by_others(self, job: _JobObservations, place: _Place) -> StepCorrections | None:
        """Corrections of a place where nothing was observed of a job, None where of no job."""
        teachers = job.teachers(job.fitted, place, _others(self.seen, job))
        return job.corrections(place).fit([], [], others=teachers) if teachers else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _JobObservations:
    """The observations of one job beside what an engine predicts of them."""

    job: str
    workload: str
    engine: StepPredictor
    revision: int = -1
    observations: tuple[tuple[Observation, PredictedStep], ...] = ()
    key: Hashable = None
    # Shared by every reading of a job: what the engine says of a step does not change.
    predicted: dict[_Asked, PredictedStep | str] = field(default_factory=dict)
    fitted: Mapping[_Place, StepCorrections] = field(default_factory=dict)

    @property
    def content(self) -> JobContent:
        """What the job computes."""
        return self.engine.content

    def read(self, store: ObservationStore, revision: int) -> _JobObservations:
        """With what was observed up to a revision and later; itself where it is the same."""
        if revision == self.revision:
            return self
        observations: list[tuple[Observation, PredictedStep]] = []
        refused = Counter[str]()
        content = self.content
        described = ObservedWorkload(
            name=self.workload,
            fingerprint=content.fingerprint,
            parameter_bytes=content.parameter_bytes or None,
            optimizer=content.optimizer,
        )
        for observation in store.observations(of_job=described):
            predicted = self._predict(observation)
            if isinstance(predicted, PredictedStep):
                observations.append((observation, predicted))
            else:
                refused[predicted] += 1
        for reason, count in refused.items():
            logger.warning("%d observations of %s are left out: %s", count, self.workload, reason)
        if tuple(observations) == self.observations and self.revision >= 0:
            return self
        return replace(self, revision=revision, observations=tuple(observations))

    def _predict(self, observation: Observation) -> PredictedStep | str:
        """The engine's prediction of an observed step, cached, or why there is none."""
        steps = (
            observation.allocation,
            observation.batch_per_gpu,
            observation.accumulation_steps,
            observation.strategy,
            observation.layout,
        )
        if steps not in self.predicted:
            try:
                self.predicted[steps] = self.engine.predict(
                    observation.allocation,
                    batch_per_gpu=observation.batch_per_gpu,
                    accumulation_steps=observation.accumulation_steps,
                    strategy=observation.strategy,
                    layout=observation.layout,
                    coefficients=UNCALIBRATED,
                )
            except EstimatorError as error:
                self.predicted[steps] = str(error)
        return self.predicted[steps]

    def fit(self, others: Sequence[StepCorrections], shown: Sequence[Shown]) -> _JobObservations:
        """With the corrections of every set of machine types and layout that was observed.

        A layout counts as a job of its own, of the same content: those seen most teach the others.
        `shown` is what other jobs have shown of machines.
        """
        from estimator.calibrate.change_points import changes_of

        by_place: dict[_Place, list[tuple[Observation, PredictedStep]]] = {}
        for observation, predicted in self.observations:
            key = predicted.question.machines, predicted.question.layout
            by_place.setdefault(key, []).append((observation, predicted))
        fitted: dict[_Place, StepCorrections] = {}
        for place, observed in sorted(by_place.items(), key=lambda item: -len(item[1])):
            observed.sort(key=lambda pair: pair[0].at)
            fitted[place] = self.corrections(place).fit(
                [predicted for _, predicted in observed],
                [one.step_time_s for one, _ in observed],
                at=[one.at.timestamp() for one, _ in observed],
                hosts=[one.hosts for one, _ in observed],
                expected=changes_of(shown, place[0]),
                others=self.teachers(fitted, place, others),
                by_name=sum(one.fingerprint is None for one, _ in observed),
            )
        return replace(self, fitted=fitted)

    def corrections(self, place: _Place) -> StepCorrections:
        """Those of a place, not yet fitted."""
        from estimator.calibrate.corrections import StepCorrections

        machines, layout = place
        return StepCorrections(machines, self.content, layout=layout)

    @staticmethod
    def teachers(
        fitted: Mapping[_Place, StepCorrections], place: _Place, others: Sequence[StepCorrections]
    ) -> list[StepCorrections]:
        """What says something of a place: the jobs most like this one, and its other layouts."""
        alike = [other for other in others if other.place == place]
        machines, layout = place
        layouts = [
            corrections
            for (names, other), corrections in fitted.items()
            if names == machines and other != layout
        ]
        return [*alike[:_MOST_TEACHERS], *layouts]


def _answers(
    engine: StepPredictor,
    places: Mapping[StepQuestion, Allocation],
    corrections: StepCorrections,
    later: Sequence[Change],
) -> Iterator[tuple[StepQuestion, Coefficients]]:
    """The factors for steps that are asked, by the corrections of their place.

    The engine's overlap is not the performance model's, so the model's factors alone give another
    step than the corrected one: they are scaled by the ratio of both.
    """

    def predicted(question: StepQuestion, coefficients: Coefficients) -> PredictedStep:
        return engine.predict(
            places[question],
            batch_per_gpu=round(question.batch) or None,
            accumulation_steps=question.accumulation_steps,
            strategy=question.strategy,
            layout=question.layout,
            coefficients=coefficients,
        )

    cold = [predicted(question, UNCALIBRATED) for question in places]
    corrected = corrections.correct(cold, hosts=[step.hosts for step in places], later=later)
    for question, correction in zip(places, corrected, strict=True):
        compute, sync = correction.compute_ratio, correction.sync_ratio
        trial = Coefficients(compute_ratio=compute, update_ratio=compute, communication_ratio=sync)
        scale = correction.step_s / predicted(question, trial).step_s
        yield (
            question,
            Coefficients(
                compute_ratio=compute * scale,
                update_ratio=compute * scale,
                communication_ratio=sync * scale,
                relative_error=correction.relative_error,
                remark=correction.remark,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStep:
    """One allocation at one batch: the median of what was observed, and both predictions.

    The ratios are the factors on the engine's compute and communication in the calibrated answer.
    """

    allocation: str
    batch_per_gpu: int
    accumulation_steps: int
    strategy: str
    layout: str | None
    observations: int
    observed_s: float
    engine_s: float
    calibrated_s: float
    compute_ratio: float
    communication_ratio: float


def observations_of(store: ObservationStore, model: str, precision: str) -> list[Observation]:
    """The observations of a MODEL of the command line; raises ObservationError.

    The workload of a function is named after the function, that of a saved graph in its file; a
    precision other than fp32 makes another workload. In Python it may have gone by any name: where
    none fits, these are all observations of which the content is known.
    """
    name = (
        OpGraph.load(model).workload if is_saved_graph(model) else workload_name(model, precision)
    )
    function = workload_name(model.rpartition(":")[2], precision)
    for workload in (name, name.removeprefix("hf:"), function):
        if found := store.observations(workload=workload):
            return found
    if found := store.observations(of_known_content=True):
        return found
    known = ", ".join(list(store.workloads())[:5])
    has = f"has {printable(known)}; name one of these" if known else "is empty"
    raise ObservationError(
        f"no step of '{name}' was observed in {store.path}, which {has}; 'estimator calibrate "
        "observe' keeps steps"
    )


def fitted_steps(
    graph: OpGraph,
    observations: Iterable[Observation],
    calibrator: Calibrator,
    *,
    cluster: Cluster | None = None,
) -> Iterator[FittedStep]:
    """One for each distinct step observed of the graph's job.

    Those that cannot be estimated any more are left out. Raises ObservationError for none.
    """
    observed: dict[tuple[str, int, int, str, str], list[float]] = defaultdict(list)
    job = DEFAULT.content(graph).fingerprint
    of_job = [one for one in observations if one.fingerprint in (None, job)]
    if not of_job:
        raise ObservationError(
            f"no step of {graph.workload} was observed that computes the same; give the sequence "
            "length, optimizer and precision that were observed ('estimator calibrate show')"
        )
    for one in of_job:
        key = (
            *(one.allocation, one.batch_per_gpu, one.accumulation_steps, one.strategy),
            one.layout or "",
        )
        observed[key].append(one.step_time_s)
    for step, times_s in sorted(observed.items()):
        allocation, batch, accumulation_steps, strategy, layout = step
        try:
            request = EstimateRequest.of(
                graph,
                allocation,
                batch_per_gpu=batch,
                accumulation_steps=accumulation_steps,
                strategy=strategy,
                layout=layout or None,
                cluster=cluster,
            )
            cold = DEFAULT.estimate(request)
            calibrated = DEFAULT.estimate(request.changed(calibration=calibrator))
        except EstimatorError:
            continue
        factors = calibrated.plan.coefficients
        yield FittedStep(
            allocation=allocation,
            batch_per_gpu=batch,
            accumulation_steps=accumulation_steps,
            strategy=strategy,
            layout=layout or None,
            observations=len(times_s),
            observed_s=statistics.median(times_s),
            engine_s=cold.step_time_s,
            calibrated_s=calibrated.step_time_s,
            compute_ratio=factors.compute_ratio,
            communication_ratio=factors.communication_ratio,
        )
