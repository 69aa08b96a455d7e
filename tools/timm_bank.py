"""Trace the models of timm's published training table into a folder of graphs with an index.

    PYTHONPATH=benchmarks python tools/timm_bank.py --out DIR [--data DIR] [--only MODEL] [--retry]

``--data`` is the folder of ``timm_train.csv`` (by default those that ship in data/published);
`timm_rows` reads the table beside what this writes. It needs what ``traced_models.py`` does,
whose workers it asks. Every model is traced at each image size of the table; ``traced.jsonl`` keeps
what became of it, so that an interrupted run goes on where it stopped, and another version of timm
or torch begins anew. ``index.json`` is replaced once no model is left. With ``--only`` it
names what the folder holds by then; ``--retry`` asks again for models that failed.

The names are those of timm 0.5 and 0.6. Most build the same network in timm 1.0; `BUILT_AS` and
`REMOVED` hold the others. Whether one has the parameters that were published, `timm_rows` checks.
What no parameter shows: TResNets ran in-place activated batch norm then and plain batch norm now
(huggingface/pytorch-image-models, pull request 1785).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from options import add_data
from records import Progress, Records
from timm_rows import INDEX
from traced_models import answer, ask_all, build_timm

from estimator.calibrate.observation_files import read_rows
from estimator.errors import EstimatorError, ModelError, ObservationError
from estimator.files import write_bytes_atomically

if TYPE_CHECKING:
    from torch import Tensor

TABLE = "timm_train.csv"
RESULTS = "traced.jsonl"
# Costs are functions of the batch size: one traced batch serves all.
BATCH = 8
# What the table's steps were trained with, as `timm_rows` tells.
PRECISION = "fp16-amp"
OPTIMIZER = "sgd-momentum"
FUSED_ATTENTION = False
_INDEXED = ("file", "family", "architecture", "parameters", "batch_free")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltAs:
    """How timm 1.0 builds the network that a name of the table meant, and why not by that name."""

    architecture: str
    reason: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_ONE_FOR_ALL_WIDTHS = "its deprecated name builds resnext101_32x8d, whatever the width"
_NO_SAM_TAG = "its deprecated name asks for the weights 'sam', which timm calls 'sam_in1k'"

BUILT_AS: Mapping[str, BuiltAs] = {
    "ecaresnext50t_32x4d": BuiltAs(
        architecture="ecaresnext26t_32x4d",
        reason="it had two blocks a stage, as its 15.41 M parameters show; now it has 3, 4, 6, 3",
    ),
    "gluon_xception65": BuiltAs(
        architecture="xception65", reason="it went into the family of aligned Xceptions"
    ),
    "ig_resnext101_32x16d": BuiltAs(architecture="resnext101_32x16d", reason=_ONE_FOR_ALL_WIDTHS),
    "ig_resnext101_32x32d": BuiltAs(architecture="resnext101_32x32d", reason=_ONE_FOR_ALL_WIDTHS),
    "ig_resnext101_32x48d": BuiltAs(
        architecture="resnext101_32x32d",
        settings={"base_width": 48},
        reason=f"{_ONE_FOR_ALL_WIDTHS}, and none is 48 wide",
    ),
    "vit_base2_patch32_256": BuiltAs(
        architecture="vit_base_patch32_plus_256", reason="it was renamed"
    ),
    "vit_base_patch16_224_miil": BuiltAs(
        architecture="vit_base_patch16_224_miil",
        settings={"num_classes": 1000},
        reason="its first weights today are for 11,221 classes",
    ),
    "vit_base_patch16_224_sam": BuiltAs(architecture="vit_base_patch16_224", reason=_NO_SAM_TAG),
    "vit_base_patch32_224_sam": BuiltAs(architecture="vit_base_patch32_224", reason=_NO_SAM_TAG),
    "vit_base_r50_s16_224": BuiltAs(
        architecture="vit_base_r50_s16_224",
        settings={"num_classes": 1000},
        reason="its first weights today have no head",
    ),
}

_NO_INPLACE_ABN = "timm removed in-place activated batch norm (pull request 1785)"

REMOVED: Mapping[str, str] = {
    "cspdarknet53_iabn": _NO_INPLACE_ABN,
    "cspresnext50_iabn": _NO_INPLACE_ABN,
    "ese_vovnet99b_iabn": _NO_INPLACE_ABN,
    "resnetv2_50d_evob": "timm removed its variant with EvoNorm-B0",
    "semobilevit_s": "timm registers it no longer",
}


def main() -> None:
    """Fill the folder, or answer one that does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_data(parser)
    parser.add_argument("--out", type=Path, required=True, help="the folder of the graphs")
    parser.add_argument("--only", nargs="+", default=(), help="only these models")
    parser.add_argument("--retry", action="store_true", help="trace earlier failures again")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        answer(partial(trace_case, folder=options.out))
        return
    worker = [sys.executable, __file__, "--worker", "--out", str(options.out)]
    try:
        index = fill_bank(
            options.data / TABLE,
            options.out,
            worker=worker,
            versions=versions_here(),
            only=options.only,
            retry=options.retry,
        )
    except EstimatorError as error:
        sys.exit(f"timm_bank: {error}")
    print_summary(index)


# Driver


def fill_bank(
    table: Path,
    folder: Path,
    *,
    worker: Sequence[str],
    versions: Mapping[str, str],
    only: Sequence[str] = (),
    retry: bool = False,
) -> dict[str, Any]:
    """Trace what the folder lacks of the table's models, write its index and return it.

    `worker` is the command of a process that answers each case on its stdin with one line of JSON.
    Raises ObservationError for another table, StoreError where the index cannot be written.
    """
    cases = cases_of(table)
    known = [model_of(case) for case in cases]
    for model in only:
        if model not in known:
            raise ObservationError(f"{table} has no row of model {model}; check the name")
    folder.mkdir(parents=True, exist_ok=True)
    records = Records(folder / RESULTS)
    found = _results(records, folder, versions)
    missing = [
        case
        for case in cases
        if model_of(case) not in REMOVED
        and (not only or model_of(case) in only)
        and (case not in found or (retry and found[case]["status"] != "ok"))
    ]
    progress = Progress("timm", len(missing))
    for case, result in ask_all(list(worker), missing):
        records.add({"kind": "graph", "key": case, "versions": dict(versions), **result})
        told = f"{result['ops']} ops" if result["status"] == "ok" else result["reason"]
        progress.advance(f"{case}: {told}")
    index = index_of(cases, _results(records, folder, versions), versions)
    write_bytes_atomically(folder / INDEX, json.dumps(index, indent=0).encode())
    return index


def cases_of(table: Path) -> list[str]:
    """Every ``model@pixels`` of the table, sorted; raises ObservationError for another table."""
    cases = set()
    for line, cells in read_rows(table):
        try:
            cases.add(f"{cells['model']}@{int(cells['img_size'])}")
        except (KeyError, ValueError) as error:
            raise ObservationError(
                f"line {line} of {table} names no model and image size ({error}); give timm's "
                "training table, with columns model and img_size"
            ) from None
    return sorted(cases)


def model_of(case: str) -> str:
    """The model of a ``model@pixels``."""
    return case.partition("@")[0]


def index_of(
    cases: Sequence[str], results: Mapping[str, Mapping[str, Any]], versions: Mapping[str, str]
) -> dict[str, Any]:
    """What `timm_rows` reads: the graph of every case that was settled, or why there is none."""
    models: dict[str, dict[str, Any]] = {}
    for case in cases:
        if model_of(case) in REMOVED:
            models[case] = {"reason": REMOVED[model_of(case)]}
        elif case in results:
            result = results[case]
            fields = _INDEXED if result["status"] == "ok" else ("reason",)
            models[case] = {name: result[name] for name in fields}
    return {
        "versions": dict(versions),
        "batch": BATCH,
        "precision": PRECISION,
        "optimizer": OPTIMIZER,
        "fused_attention": FUSED_ATTENTION,
        "models": models,
    }


def versions_here() -> dict[str, str]:
    """What graphs depend on beside this package; raises ModelError where timm is not installed."""
    try:
        return {name: version(name) for name in ("timm", "torch")}
    except PackageNotFoundError as error:
        raise ModelError(
            f"the package {error.name} is not installed; install timm and torchvision in an "
            "environment of their own and run this there"
        ) from None


def print_summary(index: Mapping[str, Any]) -> None:
    """How many graphs there are, and which models have none."""
    entries = index["models"]
    reasons = Counter(entry["reason"] for entry in entries.values() if "reason" in entry)
    fixed = [case for case, entry in entries.items() if entry.get("batch_free") is False]
    print(f"{len(entries) - reasons.total()} of {len(entries)} models have a graph")
    for case in fixed:
        print(f"  {case}: at its traced batch only")
    for case, entry in entries.items():
        if "reason" in entry:
            print(f"  {case}: {entry['reason']}")


def _results(
    records: Records, folder: Path, versions: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """The last word on each case under these versions; a graph whose file is gone counts not."""
    last = {record["key"]: record for record in records.of("graph", versions=dict(versions))}
    return {
        case: record
        for case, record in last.items()
        if record["status"] != "ok" or (folder / record["file"]).is_file()
    }


# Worker


def trace_case(case: str, folder: Path) -> dict[str, Any]:
    """Save the graph of one ``model@pixels`` and tell what `index_of` needs to know of it."""
    import timm
    import torch

    import estimator as est

    name, _, pixels = case.partition("@")
    model = build(name, int(pixels))
    graph = est.trace_model(
        model,
        torch.randn(BATCH, 3, int(pixels), int(pixels)),
        loss=_cross_entropy,
        optimizer=OPTIMIZER,
        precision=PRECISION,
        target="cuda",
        name=name,
    )
    file = f"{case}.json.gz"
    graph.save(folder / file)
    architecture = model.default_cfg["architecture"]
    return {
        "status": "ok",
        "file": file,
        "family": timm.models.model_entrypoint(architecture).__module__.rpartition(".")[2],
        "architecture": architecture,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_free": graph.other_batch is not None,
        "ops": len(graph.ops),
        "assumptions": list(graph.assumptions),
        "unknown_ops": list(graph.unknown_ops),
    }


def build(name: str, pixels: int) -> Any:
    """The network that the table's name meant, made for square images of this size."""
    import timm.layers

    timm.layers.set_fused_attn(FUSED_ATTENTION)
    built_as = BUILT_AS.get(name, BuiltAs(architecture=name, reason="its name is what it was"))
    make = partial(build_timm, built_as.architecture, **built_as.settings)
    model = make()
    own_pixels = (model.default_cfg.get("input_size") or (3, 224, 224))[-1]
    if own_pixels != pixels:
        # Convolutions take images of every size, and their builders no such argument.
        with suppress(TypeError):
            model = make(img_size=pixels)
    return model


def _cross_entropy(output: Tensor | tuple[Tensor, ...], batch: Tensor) -> Tensor:
    import torch
    import torch.nn.functional as F

    scores = output[0] if isinstance(output, tuple) else output
    target = torch.empty((scores.shape[0],), dtype=torch.long).random_(scores.shape[-1])
    return F.cross_entropy(scores, target)


if __name__ == "__main__":
    main()
