"""Name optimizers, and say what each keeps of a parameter and moves to update it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from estimator.errors import StrategyError, quoted

Optimizer = Literal[
    "sgd",
    "sgd-momentum",
    "adam",
    "adamw",
    "adam-fused",
    "adamw-fused",
    "sgd-loop",
    "sgd-momentum-loop",
    "adam-loop",
    "adamw-loop",
    "adamw-8bit",
    "adamw-bf16",
    "lamb",
    "muon",
]
UpdateForm = Literal["loop", "foreach", "fused"]


class OptimizedTensor(NamedTuple):
    """A trained parameter as an optimizer holds it; `in_block` says that a repeated block has it.

    `size_bytes` are in blocks of the device's allocator.
    """

    shape: tuple[int, ...]
    elements: int
    size_bytes: int
    in_block: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """What an update moves and keeps, in tensors as large as the parameter.

    `moved_tensors` are read or written, `moved_bytes` more by each element whatever its dtype;
    `state_tensors` are kept between steps and `root_tensors` made on the way by the foreach form.
    `measured_as` is the name and `form` the form (None: as torch chooses for the device) under
    which a profile has the update. `tensor_s` are seconds of the host for each tensor.
    `gradient_reads` is how often its operators take the gradient of a vector.
    """

    measured_as: str
    form: UpdateForm | None = None
    moved_tensors: float
    moved_bytes: float = 0.0
    state_tensors: int
    root_tensors: int = 0
    tensor_s: float
    gradient_reads: int = 1

    def bytes_of(self, item_bytes: float) -> float:
        """Bytes that the update of an element moves, where it takes `item_bytes`."""
        return self.moved_tensors * item_bytes + self.moved_bytes


# An 8-bit state has one fp32 scale for a block of so many elements; smaller tensors stay in fp32
# (bitsandbytes, functional.py and optim/optimizer.py: blocksize 256, min_8bit_size 4096).
_STATE_BLOCK, _LEAST_8BIT = 256, 4096
# Two states of a byte each and their scales, read and written.
_BF16_BYTES = 2
_MOVED_8BIT = 4 * (1 + 4 / _STATE_BLOCK)
# Tensors moved by kernel: torch/optim/adam.py, sgd.py, foreach: Adam lerp 3, mul 2, addcmul 3, sqrt
# 2, div 2, add 2, addcdiv 4; AdamW one mul of 2 more; SGD add 3, momentum mul 2 and add 3 more.
# Fused Adam is one kernel: parameter, gradient and two moments read, all but the gradient written.
# LAMB is apex's (csrc/multi_tensor_lamb.cu): norms of gradients, parameters and updates 3, stage
# one 7, stage two 3. Muon (torch/optim/_muon.py, the elementwise part): lerp 3, lerp 3, then in
# bf16 cast 1.5, norm 0.5, div 1, and mul 2, add 2.5; its products are costed as such.
# Adam's gradients are the second factor of lerp and both of addcmul, LAMB's and fused ones' are
# read by a kernel; Muon leaves vectors to AdamW.
# Seconds of the host: lists and scalars for each tensor (`estimator probe` on an EPYC server: 0.9,
# 3.4, 10.6 and 12.3 µs for the first four); where torch loops over tensors, as on GPUs before
# 2.0, 1, 4, 8 and 9 operators each (torch/optim/sgd.py, adamw.py), 9 µs without autograd; for 8-bit
# states one kernel from Python; some 30 operators a matrix for Muon, at 5 to 10 µs.
_FOREACH: Mapping[str, UpdateRule] = {
    "sgd": UpdateRule(measured_as="sgd", moved_tensors=3, state_tensors=0, tensor_s=1e-6),
    "sgd-momentum": UpdateRule(
        measured_as="sgd-momentum", moved_tensors=8, state_tensors=1, tensor_s=3e-6
    ),
    "adam": UpdateRule(
        measured_as="adam",
        moved_tensors=18,
        state_tensors=2,
        root_tensors=1,
        tensor_s=1e-5,
        gradient_reads=3,
    ),
    "adamw": UpdateRule(
        measured_as="adamw",
        moved_tensors=20,
        state_tensors=2,
        root_tensors=1,
        tensor_s=1e-5,
        gradient_reads=3,
    ),
}
_LOOP_TENSOR_S = {"sgd": 9e-6, "sgd-momentum": 3.6e-5, "adam": 7.2e-5, "adamw": 8.1e-5}
_FUSED = UpdateRule(
    measured_as="adam", form="fused", moved_tensors=7, state_tensors=2, tensor_s=3e-6
)
RULES: Mapping[str, UpdateRule] = {
    **_FOREACH,
    "adam-fused": _FUSED,
    "adamw-fused": replace(_FUSED, measured_as="adamw"),
    **{
        f"{name}-loop": replace(_FOREACH[name], form="loop", tensor_s=tensor_s)
        for name, tensor_s in _LOOP_TENSOR_S.items()
    },
    "adamw-8bit": UpdateRule(
        measured_as="adamw-8bit",
        form="loop",
        moved_tensors=3,
        moved_bytes=_MOVED_8BIT,
        state_tensors=2,
        tensor_s=2e-5,
    ),
    # FusedAdam of Transformer Engine with moments in bf16, and of master weights the 16 bits beyond
    # the bf16 weight (store_param_remainders): all are read, all but the gradient written.
    "adamw-bf16": UpdateRule(
        measured_as="adamw",
        form="fused",
        moved_tensors=0,
        moved_bytes=5 * _BF16_BYTES + 4 * _BF16_BYTES,
        state_tensors=2,
        tensor_s=3e-6,
    ),
    "lamb": UpdateRule(
        measured_as="lamb", form="fused", moved_tensors=13, state_tensors=2, tensor_s=3e-6
    ),
    "muon": UpdateRule(
        measured_as="muon",
        form="loop",
        moved_tensors=13.5,
        state_tensors=1,
        tensor_s=2.5e-4,
        gradient_reads=3,
    ),
}
OPTIMIZERS: tuple[str, ...] = tuple(RULES)
# What `estimator probe` measures, in all forms that torch has.
MEASURED = tuple(
    name
    for name, rule in RULES.items()
    if name.startswith(("sgd", "adam")) and not rule.moved_bytes
)
# Classes of torchao, bitsandbytes, apex and Transformer Engine.
_ALIASES = {"adamw8bit": "adamw-8bit", "fusedadam": "adamw-fused", "fusedlamb": "lamb"}
# Options of an optimizer as torch writes it, in lower case, and whether they are set.
_OPTION = re.compile(r"\b(momentum|fused|foreach)\s*=\s*([\w.]+)")
_IS_SET = {"false": False, "none": None, "0": False, "0.0": False}
# What Muon leaves to AdamW: vectors, embeddings and the head (torch.optim.Muon's documentation).
BESIDE_MUON = "adamw"
# Passes of Newton and Schulz' iteration in Muon (ns_steps), each of three products.
MUON_PASSES = 5


def check_optimizer(optimizer: Any) -> str:
    """The name of an optimizer given as ``adamw``, ``AdamW(…)``, or an object or class of torch.

    SGD has momentum, and SGD or Adam is fused or (foreach=False) loops over its tensors, as the
    object's parameter groups, or the text, say. Raises StrategyError.

    >>> check_optimizer("torch.optim.AdamW(lr=1e-3, fused=True)")
    'adamw-fused'
    """
    groups, given = getattr(optimizer, "param_groups", None), optimizer
    if isinstance(optimizer, type):
        given = optimizer.__name__
    elif groups is not None:
        given = type(optimizer).__name__
    name = ""
    if isinstance(given, str):
        name, bracket, written = given.lower().removeprefix("torch.optim.").partition("(")
        if bracket:
            groups = [_options(written)]
    name = _ALIASES.get(name, name)
    if name == "sgd" and any(group.get("momentum") for group in groups or ()):
        name = "sgd-momentum"
    if name in ("adam", "adamw") and any(group.get("fused") for group in groups or ()):
        name = f"{name}-fused"
    elif f"{name}-loop" in RULES and any(group.get("foreach") is False for group in groups or ()):
        name = f"{name}-loop"
    if name not in OPTIMIZERS:
        raise StrategyError(
            f"optimizer {quoted(given)} is unknown; choose one of {', '.join(OPTIMIZERS)}"
        )
    return name


def _options(written: str) -> dict[str, bool | None]:
    """Which of an optimizer's options its text sets, each once; raises StrategyError."""
    options: dict[str, bool | None] = {}
    for option, to in _OPTION.findall(written):
        if option in options:
            raise StrategyError(f"an optimizer's {option} stands twice; write it once")
        options[option] = _IS_SET.get(to, True)
    return options


def is_muon_matrix(tensor: OptimizedTensor) -> bool:
    """Whether Muon updates a parameter: a matrix of a repeated block."""
    return len(tensor.shape) == 2 and tensor.in_block


def state_sizes(optimizer: str, tensor: OptimizedTensor) -> tuple[int, ...]:
    """Bytes of each state that an optimizer keeps of one parameter between steps.

    >>> state_sizes("adamw-8bit", OptimizedTensor((4096,), 4096, 16384))
    (4160, 4160)
    """
    if optimizer == "muon" and not is_muon_matrix(tensor):
        optimizer = BESIDE_MUON
    if optimizer == "adamw-bf16":
        return 2 * (_BF16_BYTES * tensor.elements,)
    if optimizer != "adamw-8bit":
        return RULES[optimizer].state_tensors * (tensor.size_bytes,)
    if tensor.elements < _LEAST_8BIT:
        return 2 * (4 * tensor.elements,)
    return 2 * (tensor.elements + 4 * -(-tensor.elements // _STATE_BLOCK),)


def master_size(optimizer: str, tensor: OptimizedTensor) -> int:
    """Bytes that stay beside a half-precision weight to make it fp32, which `tensor` is.

    >>> master_size("adamw-bf16", OptimizedTensor((4096,), 4096, 16384))
    8192
    """
    return tensor.size_bytes // 2 if optimizer == "adamw-bf16" else tensor.size_bytes


def temporaries_bytes(
    optimizer: str, tensors: Sequence[OptimizedTensor], *, foreach: bool
) -> tuple[int, int]:
    """(bytes for all parameters together, bytes for one at a time) that an update makes on the way.

    Adam takes the square root of the second moment into a fresh tensor (torch/optim/adam.py): of
    every parameter at once where it runs foreach (CUDA); one at a time in the loop (CPU), where the
    quotient is another fresh tensor and the denominator of the previous parameter is still held.
    Muon holds a matrix' update, and in bf16 that twice and its square twice.
    """
    if optimizer == "muon":
        others = [tensor for tensor in tensors if not is_muon_matrix(tensor)]
        together, single = temporaries_bytes(BESIDE_MUON, others, foreach=foreach)
        own = [
            t.size_bytes + 2 * 2 * t.elements + 2 * 2 * min(t.shape) ** 2
            for t in tensors
            if is_muon_matrix(t)
        ]
        return together, max(single, *own, 0)
    roots = RULES[optimizer].root_tensors
    sizes = [tensor.size_bytes for tensor in tensors]
    if foreach or not roots:
        return roots * sum(sizes), 0
    in_order = sizes[::-1]
    pairs = zip([0, *in_order], in_order, strict=False)
    return 0, max((previous + 2 * size for previous, size in pairs), default=0)
