"""Read timm's published training steps, each with the traced graph of its model.

What a row's step holds, by timm's ``benchmark.py`` as of 2022 (huggingface/pytorch-image-models,
commit 066e490, ``TrainBenchmarkRunner``): forward and cross entropy under
``torch.cuda.amp.autocast`` without a gradient scaler, backward (called inside autocast too), the
optimizer's step, and targets drawn on the device. Inputs are fp32 and already on the device. The
clock starts after ``zero_grad``, which was not waited for: its kernels count, its host time does
not. Each step ends in a synchronisation; the mean of 40 after 10 for warming up.
``cudnn.benchmark`` is on. The batch starts at one for all models and shrinks until it fits. Dropout
is 0, drop path the model's own.
The default optimizer, ``create_optimizer_v2(model, opt="sgd", lr=1e-4)``, is torch's SGD with
momentum 0.9, Nesterov and no decay. In torch 1.10 to 1.12 that is a loop over tensors (``foreach``
is off where not asked for, torch/optim/sgd.py of 1.12), and ``zero_grad`` writes zeros (gradients
became None by default in 2.0, its release notes), so backward adds each gradient to them.
Attention was written out in products and a softmax, and the bank's graphs are traced so.

The table holds most models several times, by torch version and memory layout; every row is kept.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from published.machines import machine_name
from published.rows import NotMapped

from estimator.calibrate.observation_files import Row, read_rows
from estimator.errors import GraphFileError, ObservationError

INDEX = "index.json"
_PRECISIONS = {"amp fp16": "fp16-amp"}
# What builds of one model may differ by: tables round parameters to 10,000.
_PARAMETERS_RATIO = 0.005

_INPLACE_NORM = "tresnet"

Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmRow:
    """One measured training step on one device, and the file of the graph that it ran.

    The graph is traced in the layout nchw whatever `layout` says. `family` is the timm module that
    defines the model, by which families are left out.
    """

    line: int
    model: str
    family: str
    graph_path: Path
    machine: str
    image_size: int
    batch_per_gpu: int
    layout: Layout
    precision: str
    torch: str
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimmTable:
    """The rows that have a graph, and how many have none for which reason."""

    rows: tuple[TimmRow, ...]
    refused: Mapping[str, int]


def read_timm_rows(table: Path, bank: Path) -> TimmTable:
    """The rows of ``timm_train.csv`` whose models have a graph in the folder `bank`.

    The folder's ``index.json`` says of every model and image size which file holds its graph, which
    family it is of and how many parameters it has, or why there is none. Raises GraphFileError,
    ObservationError.
    """
    index = read_index(bank)
    rows: list[TimmRow] = []
    refused: Counter[str] = Counter()
    for line, cells in read_rows(table):
        try:
            rows.append(_row(line, cells, bank, index))
        except NotMapped as reason:
            refused[str(reason)] += 1
        except (KeyError, ValueError) as error:
            raise ObservationError(
                f"line {line} of {table} is no row of timm's training table ({error}); give the "
                "table with model, gpu, precision, layout, batch, img_size, param_count_M, "
                "step_time_ms and torch"
            ) from None
    return TimmTable(rows=tuple(rows), refused=dict(refused.most_common()))


def entry_of(cells: Row, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the bank's index says of a row's model at its size; raises NotMapped without a graph."""
    model, size = cells["model"], cells["img_size"]
    entry: Mapping[str, Any] | None = index.get(f"{model}@{size}")
    if entry is None:
        raise NotMapped(f"{model} at {size} pixels is not in the bank")
    if "reason" in entry:
        raise NotMapped(f"{model} has no graph: {entry['reason']}")
    published = float(cells["param_count_m"]) * 1e6
    if abs(entry["parameters"] - published) > _PARAMETERS_RATIO * published:
        raise NotMapped(f"{model} had {published:.4g} parameters, now {entry['parameters']:.4g}")
    return entry


def _row(line: int, cells: Row, bank: Path, index: Mapping[str, Any]) -> TimmRow:
    model, size = cells["model"], int(cells["img_size"])
    if model.startswith(_INPLACE_NORM):
        raise NotMapped("TResNet ran in-place batch norm, which timm has removed (#1785)")
    entry = entry_of(cells, index)
    if not entry["batch_free"]:
        raise NotMapped(f"the graph of {model} holds at its traced batch only")
    precision = _PRECISIONS.get(cells["precision"])
    if precision is None:
        raise NotMapped(f"the bank has no graphs in precision {cells['precision']}")
    layout: Layout = "nhwc" if cells["layout"] == "nhwc" else "nchw"
    return TimmRow(
        line=line,
        model=model,
        family=entry["family"],
        graph_path=bank / entry["file"],
        machine=machine_name(cells["gpu"]),
        image_size=size,
        batch_per_gpu=int(cells["batch"]),
        layout=layout,
        precision=precision,
        torch=cells["torch"],
        step_time_s=float(cells["step_time_ms"]) / 1e3,
    )


def read_index(bank: Path) -> Mapping[str, Any]:
    """The entries of a bank's index by model and size; raises GraphFileError."""
    path = bank / INDEX
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["models"]
    except FileNotFoundError:
        raise GraphFileError(
            f"there is no {path}; trace timm's models into this folder first"
        ) from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise GraphFileError(f"{path} is no index of timm's graphs; trace them again") from None
    return found
