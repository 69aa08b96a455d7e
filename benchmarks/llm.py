"""Ask published steps of large language models as they were run, and judge every answer.

Tables are ``llm_published.csv`` and, for its recipes, ``llm_recipes.csv``. Every row is asked with
its own layout, batches, precision and recipe; what cannot be asked is counted by the reason. Half
of the models, drawn by `SEED`, are asked only with ``--only unseen``: nothing is tuned on them. Two
rows of a release whose vendor states a regression are left out.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from options import Options
from records import kept_graph, say, times_of
from summary import format_rows, summarise
from torch import Tensor, nn

import estimator
from estimator.api import with_recipe
from estimator.errors import EstimatorError
from estimator.graph.ir.op_graph import OpGraph
from estimator.graph.models import load_model
from estimator.workload.layouts import layers_of

SEED = 20261126
# A regression that the vendor states (Megatron-Bridge, docs/performance-summary-archive.md).
LEFT_OUT = ("GPT OSS 120B", "MXFP8", "26.06.01")
KNOWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
# Settings of a model in transformers' words; of DeepSeek-V3 61 layers and one that predicts the
# token after the next.
MODELS: dict[str, str] = KNOWN["models"]
# What the formats that tables name are, by Transformer Engine's recipes (Megatron-Bridge,
# scripts/performance/utils/precision.py); the first releases give none.
_SCALINGS: dict[str, str] = KNOWN["scalings"]
# NeMo AutoModel's runs, by (model, task, whether tensors are divided): the graph that is traced and
# the expert ranks (NVIDIA-NeMo/Automodel, examples/llm_benchmark; its fine-tuning is LoRA on every
# projection, docs/performance-summary.mdx). torch.compile has run what is behind checkpoints.
_AUTOMODEL = {tuple(row[:3]): tuple(row[3:]) for row in KNOWN["automodel"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published step and its recipe, as the tables have them."""

    number: int
    published: dict[str, str]
    recipe: dict[str, str]

    @property
    def model(self) -> str:
        text = self.published["model"].lower()
        for pattern, name in KNOWN["names"].items():
            if found := re.search(pattern, text):
                return found.expand(name).replace("b", "B") if "\\" in name else name
        raise ValueError(f"no model is called {text}")

    @property
    def axes(self) -> dict[str, int]:
        found = re.findall(r"(tp|pp|cp|vpp|vp|ep|dp|fsdp)(\d+)", self.published["parallelism"])
        return {name: int(value) for name, value in found}

    @property
    def is_megatron(self) -> bool:
        return any(
            word in self.published["source"] for word in ("Bridge", "NeMo docs", "Megatron-LM")
        )

    @property
    def release(self) -> str:
        return self.published["framework_version"].rpartition(" ")[2]


def rows_of(data: Path) -> list[Row]:
    with (data / "llm_published.csv").open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    with (data / "llm_recipes.csv").open(encoding="utf-8") as file:
        recipes = list(csv.DictReader(file))
    found = []
    for number, each in enumerate(published):
        own = [r for r in recipes if _is_of(r, each)]
        row = Row(number=number, published=each, recipe=own[0] if own else {})
        known = each["model"], each["precision"], row.release
        if known != LEFT_OUT:
            found.append(row)
    return found


def _is_of(recipe: dict[str, str], row: dict[str, str]) -> bool:
    keys = {"model": "model", "precision": "precision", "gpus": "gpus", "gbs": "global_batch"}
    keys["layout"] = "parallelism"
    return (
        row["source"].endswith("Bridge")
        and row["framework_version"].endswith(f" {recipe['release']}")
        and row["gpu"].startswith(recipe["gpu"])
        and all(recipe[own] == row[other] for own, other in keys.items())
        and float(recipe["mbs"]) == float(row["local_batch"])
    )


def unseen(models: Sequence[str]) -> frozenset[str]:
    """The half of the models that nothing is tuned on."""
    return frozenset(random.Random(SEED).sample(sorted(set(models)), k=len(set(models)) // 2))


class Refused(Exception):
    """A row that cannot be asked, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A row as the engine is asked it."""

    graph: tuple[str, int, str]
    allocation: str
    batch: int
    accumulation: int
    strategy: str
    layout: str | None
    recipe: str | None


def question_of(row: Row) -> Question:
    """How a row is asked; raises Refused."""
    published, axes = row.published, row.axes
    tp, pp, cp = (axes.get(name, 1) for name in ("tp", "pp", "cp"))
    virtual = max(axes.get("vp", 1), axes.get("vpp", 1))
    gpus = int(published["gpus"])
    dp = gpus // (tp * pp * cp)
    whole = int(published["global_batch"])
    # A pipeline whose micro-batch is not said has the smallest.
    batch = int(float(published["local_batch"] or (1 if pp > 1 else max(whole // dp, 1))))
    batch = min(batch, whole // dp)
    if batch < 1 or whole % (batch * dp):
        raise Refused("batches do not divide")
    fsdp = (
        axes.get("fsdp", 0) > 1
        or "fsdp" in published["parallelism"]
        or "ZeRO-3" in published["parallelism"]
    )
    parts = [f"tp={tp},vocab"] if tp > 1 else []
    if tp > 1 and ("sp" in published["parallelism"].split("/") or "NVIDIA" in published["source"]):
        parts.append("sp")
    parts += [f"cp={cp}"] if cp > 1 else []
    ep = max(axes.get("ep", 1), _automodel(row)[1])
    parts += [f"ep={ep}"] if ep > 1 else []
    if pp > 1:
        parts.append(f"pp={pp}" + (f",schedule=interleaved:{virtual}" if virtual > 1 else ""))
    # A later release's recipe may lay out other stages.
    cut = row.recipe.get("pp_layout") or ""
    parts += [f"cut={cut}"] if len(layers_of((cut,))) == pp * virtual else []
    parts += ["megatron"] if tp * pp > 1 and row.is_megatron else []
    strategy = "distributed-optimizer:bucket=256MiB,first=256MiB,master"
    if fsdp:
        strategy = "fsdp:shard=8" if "hsdp" in published["parallelism"] else "fsdp"
    return Question(
        graph=(row.model, int(float(published["seq_len"])), _variant(row)),
        allocation=_allocation(published["gpu"], gpus),
        batch=batch,
        accumulation=whole // (batch * dp),
        strategy=strategy,
        layout=",".join((*parts, "dp=*")) if parts else None,
        recipe=_recipe_of(row)
        if row.is_megatron or _automodel(row)[0] in ("plain", "lora-all")
        else None,
    )


def _automodel(row: Row) -> tuple[str, int]:
    key = row.model, row.published["task"].strip(), row.axes.get("tp", 1) > 1
    known = "AutoModel" in row.published["source"]
    return _AUTOMODEL.get(key, ("plain", 1)) if known else ("", 1)


def _variant(row: Row) -> str:
    notes = row.published["notes"].lower()
    if variant := _automodel(row)[0]:
        return variant
    if row.recipe.get("peft") == "lora":
        return "lora"
    if "recompute=full" in notes or "full recompute" in notes:
        return "full"
    return "plain" if row.is_megatron or "selective ac" not in notes else "selective:2"


def _allocation(gpu: str, gpus: int) -> str:
    # Machines of the catalogue, and GPUs that reach each other over NVLink.
    machine, per_node = KNOWN["machines"][gpu]
    nodes = -(-gpus // per_node)
    return f"{nodes}x{gpus // nodes}:{machine}"


def _recipe_of(row: Row) -> str:
    published, recipe = row.published, row.recipe
    said = published["precision"].lower()
    if not said and published["source"].endswith("Bridge"):
        # The release that names no precision has the steps of the next one's rows in FP8.
        blocks = row.model in ("Qwen3-30B-A3B", "DeepSeek-V3") and "H100" not in published["gpu"]
        said = "mxfp8" if blocks else "fp8"
    parts = [f"fp8={_SCALINGS[said]}"] if said in _SCALINGS else []
    # Some rows of the first releases are known by the recipe of a later one.
    is_late = row.release >= "26.06" or not recipe.get("dispatcher")
    if "fp8_dot_product_attention=True" in recipe.get("other", "") and is_late:
        parts.append("fp8-attention")
    # AutoModel compiles the activation of experts with its clamps (components/moe/experts.py).
    is_fused = "cutedsl_fused_grouped_mlp=True" in recipe.get("other", "") and is_late
    if is_fused or _automodel(row)[1] > 1:
        parts.append("fused-grouped-mlp")
    if row.model == "DeepSeek-V3":
        parts += ["deterministic", "precision-aware-optimizer"]
    graphs = recipe.get("cuda_graph") or ""
    if "full_iteration" in (graphs, recipe.get("scope")) and is_late:
        parts.append("graphs=iteration")
    elif graphs in ("transformer_engine", "full_iteration"):
        parts.append("graphs=layers")
    if dispatcher := recipe.get("dispatcher"):
        parts.append(f"dispatch={dispatcher}")
    if recipe.get("a2a_overlap") == "True" and (is_late or dispatcher != "hybridep"):
        parts.append("expert-overlap")
    if modules := re.findall(r"\w+", recipe.get("recompute_modules") or ""):
        parts.append("recompute=" + "+".join(modules))
    for name in ("recompute_layers", "offload_layers"):
        if layers := recipe.get(name):
            parts.append(f"{name.replace('_', '-')}={layers}")
    if row.axes.get("tp", 1) > 1 and said != "nvfp4" and "NVIDIA" in published["source"]:
        parts.append("tp-overlap")
    return "megatron" + (":" + ",".join(parts) if parts else "")


@lru_cache(maxsize=2)
def traced(folder: Path, model: str, length: int, variant: str) -> OpGraph:
    """A model, traced once and kept in a folder."""
    name = f"{model} {length} {variant}".replace(" ", "_").replace(":", "-")
    return kept_graph(folder / f"{name}.graph", lambda: _traced(model, length, variant))


@lru_cache(maxsize=2)
def graph_of(folder: Path, graph: tuple[str, int, str], recipe: str | None) -> OpGraph:
    """A traced model under a recipe; what FSDP gathers by itself is compiled by itself."""
    how = {"compiled": "blocks"} if recipe is None else {"recipe": recipe}
    return with_recipe(traced(folder, *graph), **how)


def _traced(model: str, length: int, variant: str) -> OpGraph:
    module, batch, loss, _ = load_model(
        f"hf:{MODELS[model]}", batch=2, seq_len=length, weights=False
    )
    if variant.startswith("lora"):
        _adapt(module, "_proj" if "all" in variant else ("q_proj", "k_proj", "v_proj"))
    return estimator.trace_model(
        module,
        batch,
        loss,
        target="cuda",
        precision="bf16",
        checkpoint=variant.removeprefix("lora-all-") if variant.endswith(("full", ":2")) else None,
        name=model,
    )


def _adapt(module: nn.Module, names: str | tuple[str, ...]) -> None:
    """Freeze a model but for adapters of rank 16 on layers with such names."""
    module.requires_grad_(False)
    for path, layer in list(module.named_modules()):
        if path.endswith(names):
            parent = module.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], Adapted(layer))


class Adapted(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        kind = {"device": layer.weight.device, "dtype": layer.weight.dtype, "bias": False}
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 16, **kind)
        self.up = nn.Linear(16, layer.out_features, **kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def case_of(row: Row, folder: Path) -> dict[str, Any]:
    """What the engine answers to a row, beside what was published; graphs stay in a folder."""
    published = row.published
    case: dict[str, Any] = {
        "id": f"llm_published:{row.number + 2}",
        "source": published["source"],
        "model": row.model,
        "machine": published["gpu"],
        "ranks": int(published["gpus"]),
        "precision": published["precision"],
        "strategy": published["parallelism"],
        "global_batch": int(published["global_batch"]),
        "release": row.release,
        "method": "cold",
        "measured_s": float(published["step_time_s"]),
        "noise_ratio": None,
        "status": "no_prediction",
    }
    try:
        asked = question_of(row)
        case["recipe"] = asked.recipe
        answer = estimator.estimate(
            graph_of(folder, asked.graph, asked.recipe),
            asked.allocation,
            batch_per_gpu=asked.batch,
            accumulation_steps=asked.accumulation,
            strategy=asked.strategy,
            layout=asked.layout,
        )
    except (Refused, EstimatorError) as error:
        return case | {"reason": str(error)}
    return case | {
        "status": "ok",
        **times_of(answer),
        "fits": answer.fits,
        "memory_gib": answer.peak_memory_bytes / 2**30,
        "breakdown": asdict(answer.breakdown),
        "layout": asked.layout,
    }


def run(options: Options) -> Mapping[str, Any]:
    """Every row that is asked for; a quick run takes Llama-3 8B."""
    if not (options.data / "llm_published.csv").is_file():
        raise FileNotFoundError(f"{options.data} has no llm_published.csv; say --data DIR")
    words = options.only or (("Llama-3 8B",) if options.quick else ())
    rows = rows_of(options.data)
    hidden = unseen([row.model for row in rows])
    rows = [row for row in rows if (row.model in hidden) == ("unseen" in words)]
    rows = [row for row in rows if _is_named(row, [word for word in words if word != "unseen"])]
    # Rows of one model and recipe follow each other: few graphs are held at a time.
    rows.sort(key=lambda row: (row.model, row.published["seq_len"], row.published["precision"]))
    cases = []
    for row in rows:
        cases.append(case_of(row, options.work))
        say(_line(cases[-1]))
    return {"cases": cases, "report": _report(cases)}


def _is_named(row: Row, words: Sequence[str]) -> bool:
    published = row.published
    named = f"llm_published:{row.number + 2}", row.model, published["gpu"], published["precision"]
    return all(any(word in name for name in named) for word in words)


def _line(case: dict[str, Any]) -> str:
    predicted = case.get("predicted_s")
    what = f"{case['id']} {case['model']} {case['machine']} {case['precision']} {case['strategy']}"
    if predicted is None:
        return f"{what}: {case['reason']}"
    measured = case["measured_s"]
    found = f"{predicted:.3f} s, published {measured:.3f}: x{predicted / measured:.2f}"
    return f"{what}: {found}, fits {case['fits']} ({case['memory_gib']:.0f} GiB)"


def _report(cases: Sequence[dict[str, Any]]) -> list[str]:
    answered = [case for case in cases if case["status"] == "ok"]
    refused = Counter(
        re.sub(r"'[^']*'|\d+", "…", case["reason"]) for case in cases if "reason" in case
    )
    lines = [f"{len(cases)} rows, {len(answered)} answered"]
    lines += [f"  {count} refused: {reason}" for reason, count in refused.most_common()]
    if answered:
        said = Counter(case["fits"] for case in answered)
        lines.append("fits: " + ", ".join(f"{word} {count}" for word, count in said.most_common()))
    every = [{**case, "source": "all"} for case in cases]
    lines.append(format_rows(summarise(every, by=("source",))))
    lines.append(format_rows(summarise(cases, by=("model", "machine"))))
    return lines
