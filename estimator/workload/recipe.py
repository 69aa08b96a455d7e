"""Say how a model is trained: precision, optimizer, compiler, a framework's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from estimator.errors import StrategyError, quoted
from estimator.units import parse_whole
from estimator.workload.knobs import changed_options, choice, option, options_text, read_options

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-amp", "fp16-amp"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def check_precision(text: str) -> str:
    """The precision's name, or StrategyError."""
    if text not in PRECISIONS:
        raise StrategyError(
            f"precision {quoted(text)} is unknown; choose one of {', '.join(PRECISIONS)}"
        )
    return text


# torch lets cuDNN round fp32 convolutions to TF32 unless told otherwise; matmuls only when told
# (torch.backends.cudnn.allow_tf32 is True, torch.backends.cuda.matmul.allow_tf32 False).
TF32_BY_DEFAULT = ("convolution", "recurrent")


def peak_dtype(precision: str) -> str:
    """The dtype of the device's peak that a model of this precision computes under.

    >>> peak_dtype("bf16-amp"), peak_dtype("tf32")
    ('bfloat16', 'tfloat32')
    """
    dtype = {"fp32": "float32", "tf32": "tfloat32"}.get(precision)
    if dtype is None:
        dtype = "bfloat16" if precision.startswith("bf16") else "float16"
    return dtype


# The dtype that parameters are in under a precision where autocast or nothing casts them.
PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def parameter_dtype(precision: str) -> str:
    """What a model's parameters are in under a precision: fp32, bf16 or fp16.

    >>> parameter_dtype("bf16"), parameter_dtype("bf16-amp")
    ('bf16', 'fp32')
    """
    return precision if precision in PARAMETER_BYTES else "fp32"


Framework = Literal["megatron"]
Scaling = Literal["current", "delayed", "block", "mxfp8", "nvfp4"]
Graphs = Literal["layers", "iteration"]
Dispatch = Literal["deepep", "hybridep"]
# recompute_modules of Megatron-Core's TransformerConfig.
Recomputed = Literal[
    "layernorm", "moe_act", "mla_up_proj", "core_attn", "mlp", "moe", "shared_experts"
]
Execution = Literal["cuda-graphs", "blocks"]
Float8 = Literal["tensorwise", "rowwise"]
_layers = partial(parse_whole, most=9_999)


def _recomputed(text: str) -> tuple[str, ...]:
    modules = tuple(dict.fromkeys(text.split("+")))
    if not set(modules) <= set(get_args(Recomputed)):
        raise ValueError(f"{quoted(text)} is unknown; choose of {'+'.join(get_args(Recomputed))}")
    return modules


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained, as one value that `est.trace_model` takes.

    Its first fields are `trace_model`'s keywords: `clip` (`clip_grad_norm`) is the norm that
    gradients are clipped to, `checkpointing` its `checkpoint`, `compile` its `compiled`. None
    leaves it to the model. Raises StrategyError.

    >>> recipe = Recipe(precision="bf16-amp", optimizer="adamw-fused", checkpointing="full")
    >>> recipe.precision, recipe.clip
    ('bf16-amp', None)

    With `framework` it is Megatron-Core's step with Transformer Engine's kernels, and what follows
    is what a run of it switches: ``megatron:fp8=mxfp8,graphs=iteration`` has linear layers of
    blocks in FP8 with one of Transformer Engine's scalings, weights held in FP8 and cast once a
    step, and the whole step
    replayed as one CUDA graph ("layers": each layer's). `fp8_attention` computes attention in FP8
    too, and `deterministic` forbids kernels that add in any order. `tp_overlap` runs
    tensor-parallel exchanges beside products (userbuffers). Modules of `recompute`, by
    Megatron-Core's names (``recompute=layernorm+moe_act``), and the first `recompute_layers` blocks
    whole are computed again for gradients; what `offload_layers` blocks save waits on the host.
    Tokens go to experts of other ranks once for each expert (NCCL's all-to-all), or by `dispatch`
    once for each node and rank; with `expert_overlap` beside another micro-batch. With
    `fused_grouped_mlp` the products of experts do what stands between them (Transformer Engine's
    op fuser). A `precision_aware_optimizer` has Adam's moments in bf16 and, of master weights, only
    the 16 bits beyond the bf16 weight ("adamw-bf16").
    """

    precision: Precision | None = None
    optimizer: str | None = None
    clip: float | bool | None = None
    grad_scaler: bool = False
    checkpointing: str | None = None
    compile: bool | Execution | None = None
    float8: Float8 | None = None
    channels_last: bool = False
    framework: Framework | None = None
    fp8: Scaling | None = choice("fp8", *get_args(Scaling))
    fp8_attention: bool = option("fp8-attention")
    deterministic: bool = option("deterministic")
    graphs: Graphs | None = choice("graphs", *get_args(Graphs))
    tp_overlap: bool = option("tp-overlap")
    dispatch: Dispatch | None = choice("dispatch", *get_args(Dispatch))
    expert_overlap: bool = option("expert-overlap")
    fused_grouped_mlp: bool = option("fused-grouped-mlp")
    precision_aware_optimizer: bool = option("precision-aware-optimizer")
    recompute: tuple[str, ...] = option(
        "recompute", _recomputed, (), written="+".join, values="|".join(get_args(Recomputed))
    )
    recompute_layers: int = option("recompute-layers", _layers, 0, values="4")
    offload_layers: int = option("offload-layers", _layers, 0, values="4")

    def __post_init__(self) -> None:
        if self.precision is not None:
            check_precision(self.precision)
        for name, known in (("compile", Execution), ("float8", Float8)):
            value = getattr(self, name)
            if isinstance(value, str) and value not in get_args(known):
                raise StrategyError(
                    f"{name} {quoted(value)} is unknown; choose one of {', '.join(get_args(known))}"
                )
        if self.framework is None and (switches := changed_options(self)):
            raise StrategyError(
                f"{switches[0]} is a switch of a framework; say framework='megatron' too"
            )

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """Read ``megatron``, ``megatron:fp8=current,tp-overlap``; raises StrategyError.

        >>> Recipe.parse("megatron:fp8=nvfp4,graphs=iteration").fp8
        'nvfp4'
        """
        if isinstance(text, Recipe):
            return text
        framework, _, settings = text.partition(":")
        if framework.strip() not in get_args(Framework):
            raise StrategyError(
                f"recipe {quoted(text)} is unknown; write megatron, or leave it out"
            )
        try:
            return cls(framework="megatron", **read_options(cls, settings, "megatron"))
        except ValueError as error:
            raise StrategyError(f"{quoted(text)}: {error}") from None

    def __str__(self) -> str:
        """The framework's part as `parse` reads it; empty where torch alone trains."""
        return ":".join(filter(None, (self.framework, options_text(self))))
