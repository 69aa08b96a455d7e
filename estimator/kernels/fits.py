"""Turn probed kernel calls into seconds for calls never probed, by the terms of their cost.

Each family of operators has a physical form (a constant, work and traffic terms, all ≥ 0) fitted to
its probed points in relative error by non-negative least squares; what the form leaves is smoothed
over the probed points in log-feature space (Nadaraya 1964, Watson 1964) and multiplied back in.
On a GPU a term of what computes is its seconds by the datasheet model, which knows of tiles, waves
and the alignment of rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from estimator.elementwise import Array, Flags, Indices
from estimator.errors import ProfileError, printable
from estimator.graph.costs.call_costs import (
    Features,
    family_of,
    features_of,
    nonnegative_fit,
)
from estimator.graph.costs.registry import formula_of
from estimator.graph.memory.sizes import BLOCK, WIDEST_DEPTHWISE
from estimator.kernels.roofline import COMPUTED_FAMILIES, KernelPrediction, Roofline, is_unaligned
from estimator.machines.profile import Device, KernelPoint, MachineProfile
from estimator.tensors import ITEM_BYTES, OpCall

# What a kernel that is bound by memory takes goes by the bytes that it moves; between calls of as
# many bytes, row lengths and runs of neighbouring elements count for half their logarithm.
_SHAPE_WEIGHT = 0.5
# One matmul for each image and group.
_MATMULS = "matmuls by group"
# Elements read one after the other beyond a page (4 KiB of int8, 16 KiB of fp32) gain no more.
_LONGEST_RUN = 4096


def terms(features: Features, kind: str = "") -> tuple[float, ...]:
    """The physical terms whose non-negative combination is the time of a call of variant `kind`."""
    cost = features.cost
    if features.family == "matmul":
        batch, rows, columns, inner = features.dims[:4]
        return (
            1.0,
            batch * rows * columns * inner,
            batch * rows * inner,
            batch * inner * columns,
            batch * rows * columns,
        )
    if features.family == "convolution":
        images, channels_in, channels_out, groups = features.dims[:4]
        flops_ratio, bytes_ratio = _filled_ratios(features, kind)
        return (
            1.0,
            groups if kind == _MATMULS else images,
            flops_ratio * cost.flops,
            bytes_ratio * cost.read_bytes,
            bytes_ratio * cost.written_bytes,
            images * channels_in * channels_out * groups,
        )
    if features.family in ("attention", "recurrent"):
        return (1.0, cost.flops, cost.read_bytes, cost.written_bytes)
    if features.family == "reduction" and kind == "across":
        return (1.0, 0.0, cost.flops, cost.read_bytes + cost.written_bytes)
    rows, moved = features.dims[0] if features.dims else 1.0, cost.read_bytes + cost.written_bytes
    if features.family == "normalization":
        # On a GPU one block of threads reads a row, a channel of all images in batch norm: where
        # rows are few, most of the chip waits for the longest.
        return (1.0, rows, features.dims[1], cost.flops, moved)
    return (1.0, rows, cost.flops, moved)


def _filled_ratios(features: Features, kind: str) -> tuple[float, float]:
    """How many times the flops and bytes a convolution has once its channels fill whole blocks."""
    _, channels_in, channels_out, groups, out_positions, _, in_positions, _ = features.dims
    if kind.startswith("depthwise"):
        ratio = _filled(groups) / groups
        return ratio, ratio
    if groups > 1 or kind.startswith("matmul"):
        return 1.0, 1.0
    # The first layer reads its few channels as they are.
    filled_in = channels_in if kind.startswith("first layer") else _filled(channels_in)
    filled_out = _filled(channels_out)
    moved = channels_in * in_positions + channels_out * out_positions
    filled = filled_in * in_positions + filled_out * out_positions
    return filled_in * filled_out / (channels_in * channels_out), filled / moved


def _filled(channels: float) -> float:
    return math.ceil(channels / BLOCK) * BLOCK


def coordinates(features: Features) -> tuple[float, ...]:
    """Where a call stands in log-feature space."""
    dims = [math.log(max(value, 1.0)) for value in features.dims]
    if features.family in ("matmul", "convolution", "attention"):
        return tuple(dims)
    moved = math.log(max(features.cost.moved_bytes, 1.0))
    row = dims[-1] if len(dims) > 1 else 0.0
    run = math.log(min(max(features.innermost_run, 1), _LONGEST_RUN))
    return (moved, _SHAPE_WEIGHT * row, _SHAPE_WEIGHT * run)


def variant(call: OpCall, features: Features, threads: int) -> str:
    """Which algorithm a call runs, as far as its shape tells; other variants count as far away.

    Convolutions on CPU: torch runs a 1×1 kernel as one matmul per image and group where one thread
    and a batch under 16 are all there is (aten/src/ATen/native/Convolution.cpp, `use_mkldnn`), and
    matmuls narrower than a vector run several times slower; else oneDNN, which tells groups, first
    layers, strides and filters too wide for its depthwise gradient apart, and copies no image whose
    channels lie innermost into blocks.
    Reductions: over the innermost dimension, or across rows that stay vectors.
    """
    if features.family == "convolution":
        return _convolution_variant(call, features, threads)
    if features.family == "reduction" and call.inputs:
        over = call.arguments[1] if len(call.arguments) > 1 else None
        last = len(call.inputs[0].shape) - 1
        if isinstance(over, tuple) and over and last not in over and -1 not in over:
            return "across"
        return "along"
    return f"{features.layout}, unaligned" if is_unaligned(features) else features.layout


def _convolution_variant(call: OpCall, features: Features, threads: int) -> str:
    kind = _convolution_kind(call, features, threads)
    image = call.arguments[1 if "backward" in call.target else 0]
    channels_last = image.strides is not None and image.strides[1] == 1
    return f"{kind}, channels last" if channels_last and "matmul" not in kind else kind


def _convolution_kind(call: OpCall, features: Features, threads: int) -> str:
    images, channels_in, channels_out, groups, positions, kernel, _, stride = features.dims
    transposed = any(argument is True for argument in call.arguments[:10])
    strided = " strided" if stride > 1 else ""
    one_by_one = kernel == 1 == stride and not transposed
    if one_by_one and images < 16 and threads == 1 and call.dtype == "float32":
        if groups > 1:
            return _MATMULS
        return "matmul" if positions >= BLOCK else "matmul narrow"
    if groups > 1:
        if not channels_in == channels_out == 1:
            return "grouped"
        wide = "backward" in call.target and kernel > WIDEST_DEPTHWISE**2
        return "depthwise wide" if wide else f"depthwise{strided}"
    if transposed:
        return "transposed"
    if channels_in < 8:
        return "first layer"
    if kernel > 1:
        return "dense"
    return f"pointwise{strided}"


# Width of the smoothing kernel in natural-log units, and how far another operator of the same
# family, or another variant of it, counts as away.
_WIDTH = 0.8
_OTHER_TARGET = 1.5
_OTHER_VARIANT = 1.5
# Emptying all caches before a call that works through blocked copies also evicts what a training
# step keeps warm (the library's own code and tables): such a call is charged at most reading its
# tensors and their copies from main memory on top of its time with everything in cache.
_WITH_SCRATCH = ("convolution", "attention", "recurrent")
_SCRATCH_PASSES = 2.0
# Weight of "no correction" among the neighbours: far from every point the physical form stands.
_PRIOR_WEIGHT = 0.2
# No kernel is shorter, whatever its form says.
_SHORTEST_S = 1e-9
# What a call that the probe has timed is off by in a step: a median of five
# repeats whose 10–90 % range is ±6 % (median of 676 calls probed on two cores of an EPYC server).
_TIMED_ERROR = 0.03
# From so many points on, a fit can be judged without one of them.
_FEWEST_POINTS = 3
# Several times what the probe times of a family: each is set beside every other.
_MOST_POINTS = 2000
# A fit through fewer points cannot be left one out: by how much it is taken to be off.
_UNJUDGED_ERROR = 0.5
# A family fitted in another dtype errs this many times as much: its rates are those of other units.
_OTHER_DTYPE_ERROR_RATIO = 2.0
# By which family's kernels one is predicted that the probe does not time.
_STAND_INS = {"fourier": "other"}


# Matmuls of float32 on tensor cores: not a dtype of tensors but of what multiplies them.
_TF32 = "tfloat32"
_HALVES = ("bfloat16", "float16")
# What a graph for GPUs runs in half precision if it is traced where there is none to ask.
_ATTENTION = "aten._scaled_dot_product_"
_TRACED_ATTENTION = ("flash_attention", "efficient_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedCall:
    """One probed call with what its time depends on."""

    features: Features
    variant: str
    warm_s: float
    cold_s: float


def _wider(kind: str) -> str:
    """What a variant is one of: "depthwise" for "depthwise wide, channels last", "" for that."""
    first = kind.split(",")[0].split(" ")[0]
    return first if first != kind else ""


def _numbers(texts: Sequence[str]) -> tuple[dict[str, int], Indices]:
    """(the number of each distinct text, that of each one given)."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    return numbers, np.array([numbers[text] for text in texts])


class FamilyFit:
    """All probed calls of one family in one dtype; of very many, some drawn at random.

    Rows of terms, forms (what a unit of each term takes) and seconds are those with inputs in cache
    first, then those with inputs from memory.
    """

    def __init__(self, points: Sequence[ProbedCall], roofline: Roofline | None = None) -> None:
        self._roofline = roofline
        if len(points) > _MOST_POINTS:
            drawn = np.random.default_rng(0).choice(len(points), _MOST_POINTS, replace=False)
            points = [points[index] for index in np.sort(drawn)]
        self.points = points
        self.seconds = np.array([(p.warm_s, max(p.cold_s, p.warm_s)) for p in points]).T
        self.coordinates = np.array([coordinates(point.features) for point in points])
        kinds = [point.variant for point in points]
        # Numbers compare faster than texts; none of the points' has -1.
        self._number_of_target, self._target_of = _numbers([p.features.target for p in points])
        self._number_of_variant, self._variant_of = _numbers(kinds)
        self._wider_of = np.array([_wider(kind) for kind in kinds])
        self.rows = self._rows([p.features for p in points], kinds)
        self._forms: dict[tuple[str, str], Array] = {}
        by_form_s = self._by_form([(p.features.target, p.variant) for p in points], self.rows)
        self.residual = np.log(self.seconds / by_form_s)
        self.relative_error = self._leave_one_out_error(by_form_s[0])

    def _rows(self, some: Sequence[Features], kinds: Sequence[str]) -> Array:
        rows = np.array([terms(features, kind) for features, kind in zip(some, kinds, strict=True)])
        if self._roofline is None or some[0].family not in COMPUTED_FAMILIES:
            return np.stack([rows, rows])
        given = [(f.cost.flops, f.cost.read_bytes, f.cost.written_bytes) for f in some]
        by_datasheet = self._roofline.predict_features(some)
        seconds = np.array([(one.warm_s, one.cold_s) for one in by_datasheet]).T
        return np.stack([np.column_stack([rows[:, 0], own_s, given]) for own_s in seconds])

    def _form(self, target: str, kind: str) -> Array:
        """The form of an operator's variant by its own points; of few, as of what is wider.

        Wider than a variant is one named by its first words or none, than that all operators ("").
        """
        form = self._forms.get((target, kind))
        if form is None:
            mine = (self._target_of == self._number_of_target.get(target, -1)) | (not target)
            if kind:
                own = self._variant_of == self._number_of_variant.get(kind, -1)
                mine &= own | (self._wider_of == kind)
            # As many points as terms meet any form, and tell nothing of calls beyond them.
            # So few say by how much all calls are longer.
            if not target or mine.sum() > self.rows.shape[2]:
                form = self._fit(mine)
            else:
                wider = self._form(target, _wider(kind)) if kind else self._form("", "")
                form = self._scaled(wider, mine)
            self._forms[target, kind] = form
        return form

    def _fit(self, mine: Flags) -> Array:
        rows = self.rows[:, mine]
        # What one call alone has takes up all that is odd about it, and grows without bound.
        rows = np.where((rows != 0.0).sum(axis=1, keepdims=True) > 1, rows, 0.0)
        return np.stack(list(map(nonnegative_fit, rows, self.seconds[:, mine])))

    def _scaled(self, form: Array, mine: Flags) -> Array:
        """The form times what some points are longer than it, in the geometric mean with a 1."""
        by_form_s = np.maximum((self.rows[:, mine] * form[:, None]).sum(axis=2), _SHORTEST_S)
        log_ratios = np.log(self.seconds[:, mine] / by_form_s)
        return np.asarray(form * np.exp(log_ratios.sum(axis=1, keepdims=True) / (mine.sum() + 1)))

    def _by_form(self, kinds: Sequence[tuple[str, str]], rows: Array) -> Array:
        """Seconds of calls of these (operator, variant) by their forms alone."""
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        forms = np.stack([self._form(*kind) for kind in numbers], axis=1)
        forms = forms[:, [numbers[kind] for kind in kinds]]
        return np.asarray(np.maximum((rows * forms).sum(axis=2), _SHORTEST_S))

    def _weights(self, places: Array, targets: Indices, variants: Indices) -> Array:
        """How close calls at some places (rows) stand to each probed point (column)."""
        gaps = self.coordinates - places[:, None]
        distance = (gaps * gaps).sum(axis=2)
        distance += np.where(self._target_of == targets[:, None], 0.0, _OTHER_TARGET**2)
        distance += np.where(self._variant_of == variants[:, None], 0.0, _OTHER_VARIANT**2)
        return np.asarray(np.exp(-distance / (2 * _WIDTH**2)))

    def predict_each(self, some: Sequence[Features], kinds: Sequence[str]) -> tuple[Array, Array]:
        """(warm, cold) seconds of calls of variants `kinds`."""
        targets = [features.target for features in some]
        weights = self._weights(
            np.array([coordinates(features) for features in some]),
            np.array([self._number_of_target.get(target, -1) for target in targets]),
            np.array([self._number_of_variant.get(kind, -1) for kind in kinds]),
        )
        by_form_s = self._by_form(list(zip(targets, kinds, strict=True)), self._rows(some, kinds))
        residual = self.residual @ weights.T / (weights.sum(axis=1) + _PRIOR_WEIGHT)
        warm, cold = by_form_s * np.exp(residual)
        return warm, np.maximum(cold, warm)

    def _leave_one_out_error(self, by_form_s: Array) -> float:
        """The median error of what the other points say of each, whose form takes `by_form_s`."""
        if len(self.points) < _FEWEST_POINTS:
            return _UNJUDGED_ERROR
        weights = self._weights(self.coordinates, self._target_of, self._variant_of)
        np.fill_diagonal(weights, 0.0)
        residual = weights @ self.residual[0] / (weights.sum(axis=1) + _PRIOR_WEIGHT)
        return float(np.median(np.abs(np.log(by_form_s * np.exp(residual) / self.seconds[0]))))


def _attention_here(device: Device) -> dict[str, str]:
    """Operators of half-precision attention as traced → those that the probed device runs."""
    here = str(device.details.get("half_attention") or "")
    if not here.startswith(_ATTENTION):
        return {}
    name = here.removeprefix(_ATTENTION).removesuffix(".default")
    return {
        f"{_ATTENTION}{traced}{ending}.default": f"{_ATTENTION}{name}{ending}.default"
        for traced in _TRACED_ATTENTION
        for ending in ("", "_backward")
    }


def _cold_s(point: KernelPoint) -> float:
    return point.cold_s if point.cold_s is not None else point.warm_s


class KernelFits:
    """Every family of a profile; predicts any call whose cost is known.

    Under `precision` tf32, float32 matmuls are those that the probe timed on tensor cores. `exact`
    are the seconds of probed calls.
    """

    def __init__(self, profile: MachineProfile, *, precision: str = "fp32") -> None:
        device, memory = profile.devices[0], profile.memory
        self.threads = device.threads
        self.cache_bytes = self.shared_error = 0.0
        self._name = profile.name
        self._implementations = _attention_here(device)
        is_described = device.kind == "cuda" and device.memory_bandwidth_bytes_per_s
        self._roofline = Roofline(profile) if is_described else None
        self._cold_read_s_per_byte = memory.cold_read_s_per_byte if memory else math.inf
        self._groups: defaultdict[tuple[str, str], list[KernelPoint]] = defaultdict(list)
        self._fits: dict[tuple[str, str], FamilyFit] = {}
        plain: dict[OpCall, tuple[float, float]] = {}
        rounded: dict[OpCall, tuple[float, float]] = {}
        for kernel in profile.kernels:
            is_tf32 = kernel.dtype == _TF32
            if is_tf32 and precision != "tf32":
                continue
            for point in kernel.points:
                call = point.call
                seconds = point.warm_s, max(_cold_s(point), point.warm_s)
                (rounded if is_tf32 else plain)[call] = seconds
                if formula_of(call.target) is not None:
                    dtype = _TF32 if is_tf32 else call.dtype
                    self._groups[family_of(call.target), dtype].append(point)
        # What tf32 takes replaces the same calls in float32.
        self.exact = plain | rounded
        self._tf32_families = {family for family, dtype in self._groups if dtype == _TF32}

    def fit(self, family: str, dtype: str) -> FamilyFit:
        """The fit of a family in a dtype that were probed."""
        key = family, dtype
        if key not in self._fits:
            probed = [self._probed(point, dtype) for point in self._groups[key]]
            self._fits[key] = FamilyFit(probed, self._roofline)
        return self._fits[key]

    def _probed(self, point: KernelPoint, dtype: str) -> ProbedCall:
        call = point.call
        try:
            features = features_of(call)
            assert features is not None
            if features.dtype != dtype:
                # Which rows are aligned depends on it.
                features = replace(features, dtype=dtype)
            kind = variant(call, features, self.threads)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            raise ProfileError(
                f"the profile of '{self._name}' has a probed call of {printable(call.target)} with "
                "arguments that it cannot have; run 'estimator probe' to write a new one"
            ) from None
        cold = _cold_s(point)
        if features.family in _WITH_SCRATCH:
            most = _SCRATCH_PASSES * features.cost.moved_bytes * self._cold_read_s_per_byte
            cold = min(cold, point.warm_s + most)
        return ProbedCall(features=features, variant=kind, warm_s=point.warm_s, cold_s=cold)

    def predict(self, call: OpCall) -> KernelPrediction | None:
        """Seconds of a call from the probed points; None where its family was not probed."""
        return self.predict_each([call], [features_of(call)])[0]

    def predict_each(
        self, calls: Sequence[OpCall], features: Sequence[Features | None]
    ) -> list[KernelPrediction | None]:
        """The same for several calls with their features."""
        predictions: list[KernelPrediction | None] = [None] * len(calls)
        alike: defaultdict[tuple[str, str], list[tuple[int, Features, str]]] = defaultdict(list)
        for number, (call, feature) in enumerate(zip(calls, features, strict=True)):
            known = self.exact.get(call)
            if known is not None:
                warm_s, cold_s = known
                predictions[number] = KernelPrediction(
                    warm_s=warm_s, cold_s=cold_s, relative_error=_TIMED_ERROR, source="measured"
                )
            elif feature is not None:
                feature = self._as_probed(feature)
                kind = variant(call, feature, self.threads)
                alike[feature.family, feature.dtype].append((number, feature, kind))
        for (family, dtype), some in alike.items():
            fit, error = self._fit_of(family, dtype)
            if fit is None:
                continue
            numbers, given, kinds = zip(*some, strict=True)
            warm, cold = fit.predict_each(given, kinds)
            error *= fit.relative_error
            for number, warm_s, cold_s in zip(numbers, warm.tolist(), cold.tolist(), strict=True):
                predictions[number] = KernelPrediction(
                    warm_s=warm_s, cold_s=cold_s, relative_error=error, source="fitted"
                )
        return predictions

    def _as_probed(self, features: Features) -> Features:
        """The features of what runs here in place of what was traced."""
        if features.dtype == "float32" and features.family in self._tf32_families:
            return replace(features, dtype=_TF32)
        if features.dtype in _HALVES and features.target in self._implementations:
            return replace(features, target=self._implementations[features.target])
        return features

    def _fit_of(self, family: str, dtype: str) -> tuple[FamilyFit | None, float]:
        """(the fit of a family in a dtype or the closest one, by how much more it errs)."""
        key, error = (family, dtype), 1.0
        if key not in self._groups:
            stand_in = _STAND_INS.get(family)
            same_family = [known for known in self._groups if known[0] == family]
            same_family = same_family or [known for known in self._groups if known[0] == stand_in]
            if not same_family:
                return None, 1.0
            # Halves compute and move like each other, not like float32.
            size = ITEM_BYTES.get(dtype)
            key = max(same_family, key=lambda known: ITEM_BYTES.get(known[1]) == size)
            error = _OTHER_DTYPE_ERROR_RATIO
        return self.fit(*key), error
