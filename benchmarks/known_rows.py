"""List published step times with the recipe that each was measured with, and where it stands.

`known_rows.json` quotes every figure from its source; what a source leaves open is in the remark of
its rows. Where a source gives only floating-point operations a second, the step follows by its own
count.
Left out: torchtitan's rows in float8 and with context parallelism; llm-foundry's with
transformer-engine's FP8.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from published.graphs import ModelSpec
from published.language_sources import bert, by_operator, llama, megatron_deepspeed, mpt
from published.machines import Setting
from published.sources import layout_text

# Half of the rows, drawn with this seed, are not asked while anything is being tuned.
SEED = 20261122
KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRow:
    """A published answer: seconds of a step, or only that it did not fit (None).

    `evaluations_per_step` are forward passes that the source's clock counts beside a step.
    """

    source: str
    spec: ModelSpec
    machine: str
    gpus: int
    batch_per_gpu: int
    step_time_s: float | None
    precision: str
    optimizer: str = "adamw"
    strategy: str = "ddp"
    layout: str | None = None
    accumulation_steps: int = 1
    setting: Setting | None = None
    scales_loss: bool = False
    clips_gradients: bool = False
    evaluations_per_step: float = 0.0
    remark: str = ""

    @property
    def id(self) -> str:
        compiled = ", compiled" if self.spec.compiled else ""
        where = f"{self.gpus} x {self.machine}, batch {self.batch_per_gpu}"
        layout = re.sub(r",cut=[^,]*", "", self.layout or "")
        where += f", {layout} x {self.accumulation_steps}" if layout else ""
        return f"{self.spec.name}{compiled}, {self.precision}, {where}"

    @property
    def allocation(self) -> str:
        """As the engine reads it: whole nodes, but for less than one."""
        per_node = 16 if self.machine == "dgx-2" else 8
        nodes = max(self.gpus // per_node, 1)
        return f"{nodes}x{self.gpus // nodes}:{self.machine}"


def known_rows() -> tuple[KnownRow, ...]:
    """Those whose ranks have a model each, in the order of their sources."""
    return tuple(_rows(layouts=False))


def known_layout_rows() -> tuple[KnownRow, ...]:
    """Those whose ranks share a model, in the order of their sources."""
    return tuple(_rows(layouts=True))


def unseen(rows: tuple[KnownRow, ...]) -> frozenset[str]:
    """The ids of the half that is kept for the last run."""
    return frozenset(random.Random(SEED).sample(sorted(row.id for row in rows), k=len(rows) // 2))


def _rows(*, layouts: bool) -> Iterator[KnownRow]:
    for source in KNOWN["sources"]:
        if source.get("layouts", False) is not layouts:
            continue
        recipe = KNOWN["recipes"].get(source.get("as"), {}) | source.get("recipe", {})
        columns = source["columns"]
        for cells in source["rows"]:
            fields = recipe | dict(zip(columns, cells, strict=False))
            # What a row has beyond the columns is how it differs from the recipe.
            for more in cells[len(columns) :]:
                fields |= more
            model = fields["model"]
            fields["model"] = source["models"][model] if isinstance(model, str) else model
            yield _row(source["source"], fields)


def _row(source: str, cells: Mapping[str, Any]) -> KnownRow:
    """The row of some cells: its layout follows from degrees, its step from what is quoted."""
    builder, *arguments = cells["model"]
    spec = BUILDERS[builder](*arguments).with_settings(**cells.get("settings", {}))
    changed = {name: cells[name] for name in ("name", "compiled", "channels_last") if name in cells}
    spec = replace(spec, **changed)
    fields = {name: value for name, value in cells.items() if name in KnownRow.__slots__}
    if "setting" in cells:
        fields["setting"] = Setting(**cells["setting"])
    if "samples" in cells:
        degrees = {name: cells.get(name, 1) for name in ("tp", "pp", "vp")}
        ranks = cells["gpus"] // (degrees["tp"] * degrees["pp"])
        fields["accumulation_steps"] = cells["samples"] // (ranks * cells["batch_per_gpu"])
        layout = layout_text(degrees, flags=cells.get("flags", "vocab"))
        if cells.get("is_cut_at_every_block"):
            blocks = range(dict(spec.settings)["layers"])
            layout += f",cut={'+'.join([*(f'blocks.{block}' for block in blocks), 'norm'])}"
        fields["layout"] = layout or None
    return KnownRow(source=source, spec=spec, **{"step_time_s": _step_s(cells, spec), **fields})


def _step_s(cells: Mapping[str, Any], spec: ModelSpec) -> float | None:
    """From what is counted a second; None where it did not fit."""
    samples = cells["batch_per_gpu"] * cells.get("accumulation_steps", 1)
    length, gpus = dict(spec.settings).get("length", 0), cells["gpus"]
    if rate := cells.get("samples_per_s"):
        return float(gpus * samples / rate)
    if rate := cells.get("tokens_per_s"):
        return float(gpus * samples * length / rate)
    if rate := cells.get("tokens_per_s_per_gpu"):
        return float(samples * length / rate)
    if rate := cells.get("tflops_per_s_per_gpu"):
        return flops_of(spec, cells["samples"]) / (gpus * rate * 1e12)
    return None


def flops_of(spec: ModelSpec, samples: int) -> float:
    """Of a step, as its source counts them.

    Narayanan et al., 2021, equation 3, where every block is run again; of Llama 3 405B 6 a
    parameter and token, and those of attention.
    """
    layers, width, length, vocabulary = (
        dict(spec.settings)[name] for name in ("layers", "width", "length", "vocabulary")
    )
    if spec.builder == "megatron_gpt":
        blocks = 96 * samples * length * layers * width**2
        return float(blocks * (1 + (length / (6 * width) + vocabulary / (16 * layers * width))))
    return float(samples * length * (6 * 405e9 + 6 * layers * width * length))


def _gpt2(name: str, settings: Mapping[str, Any]) -> ModelSpec:
    sizes = {"width": 768, "heads": 12, "layers": 12, "length": 1024, "hidden": 3072}
    return ModelSpec.of(
        f"GPT-2 124M {name}", "decoder", **{"vocabulary": 50257, **sizes, **settings}
    )


def _gpt(size: str, recomputes: str) -> ModelSpec:
    return megatron_deepspeed(f"GPT {size}", *KNOWN["gpts"][size], 2048, recomputes=recomputes)


BUILDERS: Mapping[str, Callable[..., ModelSpec]] = {
    "gpt2": _gpt2,
    "gpt": _gpt,
    "bert": bert,
    "mpt": lambda size, length, recomputed: mpt(size, length, recomputed=recomputed),
    "resnet50": lambda: ModelSpec.known("ResNet-50"),
    "decoder": lambda name, settings: ModelSpec.of(name, "decoder", **settings),
    "llama": llama,
    "llama by operator": lambda *of: by_operator(llama(*of)),
}
