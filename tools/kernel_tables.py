"""Read published measurements of single GPU operators, for the kernel model to be fitted to.

Sources: NeuSight (fp32, five GPUs), Sailor (fp16 and fp32 layers of GPT models, three GPUs), a
study of GPT-NeoX operators on A100 and TensorRT-LLM's kernel database (`aic`, A100 and H100); see
the README of the shared tables. Rows that time something else than one operator are left out, each
with its reason.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import Device

Array = NDArray[np.float64]

SOURCES = ("neusight_ops", "sailor_ops", "hpc_train_ops", "aic_gemm", "aic_attention")
MACHINES = {
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla T4": "t4",
    "Tesla P4": "p4",
    "A100-40GB": "a100-sxm-40gb",
    "V100-16GB": "v100-sxm",
    "TITAN RTX": "titan-rtx",
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "A100-SXM-80GB": "a100-sxm-80gb",
    "H100-SXM-80GB": "h100-sxm",
}
# Hidden size and heads of Sailor's models, from the sizes of the tensors in its table; 2048 tokens.
SAILOR_MODELS = {"GPT-Neo-2.7": (2560, 32), "OPT-350": (1024, 16), "OPT-30": (7168, 56)}
SAILOR_TOKENS = 2048
# GPT-NeoX pads GPT-2's vocabulary of 50257 to a multiple of 128.
NEOX_VOCABULARY = 50304


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One measured operator.

    `family` is matmul, attention, elementwise, softmax or normalization; `dims` are (batch, rows,
    columns, inner) of a matmul, (batch x heads, tokens, head size) of attention, else (rows, row
    length). `dtype` names the peak it computes at.
    """

    source: str
    family: str
    operator: str
    machine: str
    dtype: str
    dims: tuple[float, ...]
    flops: float
    moved_bytes: float
    seconds: float
    is_backward: bool = False

    @property
    def device(self) -> Device:
        return device_of(self.machine)

    @property
    def die(self) -> str:
        """The chip, whatever board it is on: what must be left out for a device to be unseen."""
        return str(self.device.details["architecture"])


@cache
def device_of(machine: str) -> Device:
    """The device of a machine of the catalogue."""
    return load_profile(machine).devices[0]


@dataclass(slots=True)
class OpTables:
    """The rows of all tables, and how many were left out for which reason."""

    rows: list[OpRow] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def read_op_tables(folder: Path, sources: tuple[str, ...] = SOURCES) -> OpTables:
    """Every usable row of the operator tables in a folder."""
    tables = OpTables()
    for source in sources:
        with (folder / f"{source}.csv").open(encoding="utf-8", newline="") as file:
            for plain in csv.DictReader(file):
                READERS[source](plain, tables)
    return tables


def _number(plain: dict[str, str], name: str) -> float:
    return float(plain[name]) if plain.get(name) else 1.0


def _matmul(
    source: str, operator: str, machine: str, dtype: str, dims: tuple[float, ...], seconds: float
) -> OpRow:
    batch, rows, columns, inner = dims
    item_bytes = 4.0 if dtype in ("float32", "tfloat32") else 2.0
    elements = batch * (rows * inner + inner * columns + rows * columns)
    if operator == "baddbmm":  # reads what it adds to
        elements += batch * rows * columns
    return OpRow(
        source=source,
        family="matmul",
        operator=operator,
        machine=machine,
        dtype=dtype,
        dims=dims,
        flops=2.0 * batch * rows * columns * inner,
        moved_bytes=item_bytes * elements,
        seconds=seconds,
    )


def _memory_bound(
    source: str,
    family: str,
    operator: str,
    machine: str,
    dtype: str,
    dims: tuple[float, float],
    tensors: float,
    seconds: float,
    *,
    is_backward: bool = False,
) -> OpRow:
    """`tensors` is how many tensors of rows x row length are read or written."""
    item_bytes = 4.0 if dtype == "float32" else 2.0
    elements = dims[0] * dims[1]
    return OpRow(
        source=source,
        family=family,
        operator=operator,
        machine=machine,
        dtype=dtype,
        dims=dims,
        flops=elements,
        moved_bytes=item_bytes * elements * tensors,
        seconds=seconds,
        is_backward=is_backward,
    )


_NEUSIGHT_FAMILIES = {"softmax": "softmax", "ln": "normalization"}
_TWO_INPUTS = ("add", "mul", "div", "pow")


def _read_neusight(plain: dict[str, str], tables: OpTables) -> None:
    operator, machine = plain["op"], MACHINES[plain["device"]]
    seconds = float(plain["latency_ms"]) * 1e-3
    batch, m, n, k = (_number(plain, name) for name in "BMNK")
    if operator in ("bmm", "linear"):
        dims = (batch, m, k, n) if operator == "bmm" else (1.0, batch * m, k, n)
        row = _matmul("neusight_ops", operator, machine, "float32", dims, seconds)
    else:
        family = _NEUSIGHT_FAMILIES.get(operator, "elementwise")
        tensors = 3.0 if operator in _TWO_INPUTS else 2.0
        shape = (batch, _number(plain, "H"))
        row = _memory_bound(
            "neusight_ops", family, operator, machine, "float32", shape, tensors, seconds
        )
    tables.rows.append(row)


def _read_aic_gemm(plain: dict[str, str], tables: OpTables) -> None:
    dims = (1.0, *(float(plain[name]) for name in "mnk"))
    seconds = float(plain["latency_ms"]) * 1e-3
    machine = MACHINES[plain["gpu"]]
    tables.rows.append(_matmul("aic_gemm", "gemm", machine, "bfloat16", dims, seconds))


def _read_aic_attention(plain: dict[str, str], tables: OpTables) -> None:
    names = ("batch_size", "seq_len", "num_heads", "num_kv_heads", "head_dim")
    batch, tokens, heads, kv_heads, size = (float(plain[name]) for name in names)
    tables.rows.append(
        OpRow(
            source="aic_attention",
            family="attention",
            operator="attention",
            machine=MACHINES[plain["gpu"]],
            dtype="bfloat16",
            dims=(batch * heads, tokens, size),
            flops=2.0 * batch * heads * tokens * (tokens + 1) * size,
            moved_bytes=4.0 * batch * tokens * size * (heads + kv_heads),
            seconds=float(plain["latency_ms"]) * 1e-3,
        )
    )


def _neox_matmul(operator: str, plain: dict[str, str]) -> tuple[float, ...] | None:
    batch, tokens, width, split = (_number(plain, name) for name in ("b", "l", "dim", "mp"))
    heads = _number(plain, "h")
    return {
        "linear1": (1.0, batch * tokens, 3 * width / split, width),
        "linear2": (1.0, batch * tokens, width, width / split),
        "linear3": (1.0, batch * tokens, 4 * width / split, width),
        "linear4": (1.0, batch * tokens, width, 4 * width / split),
        "linear_final": (1.0, batch * tokens, round(NEOX_VOCABULARY / split), width),
        "baddbmm": (batch * heads / split, tokens, tokens, width / heads),
        "bmm": (batch * heads / split, tokens, width / heads, tokens),
    }.get(operator)


# (family, tensors moved forward, backward) of GPT-NeoX's operators that are one kernel each way.
_NEOX_STREAMS = {
    "res_add": ("elementwise", 3.0, None),
    "gelu": ("elementwise", 2.0, 3.0),
    "layernorm": ("normalization", 2.0, 3.0),
    "softmax": ("softmax", 2.0, 3.0),
}
_NEOX_REFUSED = {
    "RMSlayernorm": "several kernels whose number is not published",
    "RoPE": "several kernels whose number is not published",
    "fillmask": "several kernels whose number is not published",
    "parallel_cross_entropy_128": "several kernels whose number is not published",
    "ScaledUpperTriangMaskedSoftmax": "a kernel of its own, not PyTorch's",
    "embedding": "its vocabulary is not published",
}


def _read_neox(plain: dict[str, str], tables: OpTables) -> None:
    operator, machine = plain["op"], MACHINES[plain["gpu"]]
    source = "hpc_train_ops"
    forward_s = _number(plain, "fwd_us") * 1e-6
    backward_s = _number(plain, "bwd_us") * 1e-6
    matmul = _neox_matmul(operator, plain)
    if matmul is not None:
        tables.rows.append(_matmul(source, operator, machine, "float16", matmul, forward_s))
    elif operator in _NEOX_STREAMS:
        family, forward, backward = _NEOX_STREAMS[operator]
        for tensors, seconds in ((forward, forward_s), (backward, backward_s)):
            if tensors is not None:
                shape = _neox_shape(operator, plain)
                row = (source, family, operator, machine, "float16", shape, tensors, seconds)
                tables.rows.append(_memory_bound(*row, is_backward=tensors is backward))
    elif operator == "flash_atten":
        tables.rows.extend(_neox_attention(plain, machine, forward_s, backward_s))
    elif operator.lower().endswith("optimizer"):
        tables.refused[f"{source}: an optimizer's step, see the updates"] += 1
    else:
        tables.refused[f"{source}: {operator}: {_NEOX_REFUSED[operator]}"] += 1


def _neox_shape(operator: str, plain: dict[str, str]) -> tuple[float, float]:
    batch, tokens, width, split = (_number(plain, name) for name in ("b", "l", "dim", "mp"))
    if operator == "softmax":
        return batch * _number(plain, "h") / split * tokens, tokens
    return batch * tokens, 4 * width / split if operator == "gelu" else width


def _neox_attention(
    plain: dict[str, str], machine: str, forward_s: float, backward_s: float
) -> Iterator[OpRow]:
    """Both passes, over all pairs of tokens: half of them would be beyond the peak rate's reach."""
    batch, tokens, width, split = (_number(plain, name) for name in ("b", "l", "dim", "mp"))
    heads = _number(plain, "h")
    size, count = width / heads, batch * heads / split
    for is_backward, seconds in ((False, forward_s), (True, backward_s)):
        yield OpRow(
            source="hpc_train_ops",
            family="attention",
            operator="flash_atten",
            machine=machine,
            dtype="float16",
            dims=(count, tokens, size),
            flops=(10.0 if is_backward else 4.0) * count * tokens * tokens * size,
            moved_bytes=2.0 * count * tokens * size * (8.0 if is_backward else 4.0),
            seconds=seconds,
            is_backward=is_backward,
        )


def _read_sailor(plain: dict[str, str], tables: OpTables) -> None:
    operator, machine = plain["op"], MACHINES[plain["gpu"]]
    if plain["algo"] != "0":  # the same layers under another all-reduce
        tables.refused["sailor_ops: repeats another row but for its collective"] += 1
        return
    width, heads = SAILOR_MODELS[plain["model"]]
    batch, split = float(plain["micro_batch"]), float(plain["tp"])
    tokens = SAILOR_TOKENS * batch
    dtype = {"fp16": "float16", "fp32": "float32"}[plain["dtype"]]
    shape = _sailor_matmul(operator, tokens, width, heads * batch / split, split)
    if shape is not None:
        if split > 1 and operator in ("enc-attention-dense", "enc-MLP-GEMM-2"):
            tables.refused["sailor_ops: contains an all-reduce"] += 1
            return
        # NGC images allow TF32 for matmuls on Ampere: it runs at 6 times the fp32 peak.
        if dtype == "float32" and machine.startswith("a100"):
            dtype = "tfloat32"
        seconds = float(plain["fwd_us"]) * 1e-6
        tables.rows.append(_matmul("sailor_ops", operator, machine, dtype, shape, seconds))
        return
    memory_bound = _sailor_memory_bound(operator, tokens, width, heads * batch / split, split)
    if memory_bound is None:
        tables.refused[f"sailor_ops: {operator}: several kernels, or none of PyTorch's"] += 1
        return
    family, dims, forward, backward = memory_bound
    for tensors, name in ((forward, "fwd_us"), (backward, "bwd_us")):
        row = ("sailor_ops", family, operator, machine, dtype, dims, tensors)
        seconds = float(plain[name]) * 1e-6
        tables.rows.append(_memory_bound(*row, seconds, is_backward=name == "bwd_us"))


def _sailor_matmul(
    operator: str, tokens: float, width: int, heads: float, split: float
) -> tuple[float, ...] | None:
    size = width / (heads * split / (tokens / SAILOR_TOKENS))
    return {
        "enc-attention-qkv": (1.0, tokens, 3 * width / split, float(width)),
        "enc-attention-dense": (1.0, tokens, float(width), width / split),
        "enc-MLP-GEMM-1": (1.0, tokens, 4 * width / split, float(width)),
        "enc-MLP-GEMM-2": (1.0, tokens, float(width), 4 * width / split),
        "enc-attention-score": (heads, float(SAILOR_TOKENS), float(SAILOR_TOKENS), size),
        "enc-attention-context": (heads, float(SAILOR_TOKENS), size, float(SAILOR_TOKENS)),
    }.get(operator)


def _sailor_memory_bound(
    operator: str, tokens: float, width: int, heads: float, split: float
) -> tuple[str, tuple[float, float], float, float] | None:
    return {
        "enc-1st-layernorm": ("normalization", (tokens, float(width)), 2.0, 3.0),
        "enc-2nd-layernorm": ("normalization", (tokens, float(width)), 2.0, 3.0),
        "enc-MLP-gelu": ("elementwise", (tokens, 4 * width / split), 2.0, 3.0),
        "enc-attention-dropout": (
            "elementwise",
            (heads * SAILOR_TOKENS, float(SAILOR_TOKENS)),
            2.5,
            2.5,
        ),
    }.get(operator)


READERS: dict[str, Callable[[dict[str, str], OpTables], None]] = {
    "neusight_ops": _read_neusight,
    "sailor_ops": _read_sailor,
    "hpc_train_ops": _read_neox,
    "aic_gemm": _read_aic_gemm,
    "aic_attention": _read_aic_attention,
}
