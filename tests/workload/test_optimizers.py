"""Optimizers: their names, and what they keep and make, worked out from their sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from estimator.errors import StrategyError
from estimator.workload.optimizers import (
    OPTIMIZERS,
    RULES,
    OptimizedTensor,
    check_optimizer,
    master_size,
    state_sizes,
    temporaries_bytes,
)

# 1024 x 512 in fp32, in a block; a vector of 1000; an embedding outside all blocks.
MATRIX = OptimizedTensor((1024, 512), 1024 * 512, 4 * 1024 * 512)
VECTOR = OptimizedTensor((1000,), 1000, 4000)
EMBEDDING = OptimizedTensor((2048, 512), 2048 * 512, 4 * 2048 * 512, in_block=False)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("form", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_of_torch_is_named_with_its_form(form: Any, fused: bool) -> None:
    found = check_optimizer(form([nn.Parameter(torch.zeros(2))], fused=fused))
    assert found == form.__name__.lower() + ("-fused" if fused else "")


@pytest.mark.parametrize("form", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_that_was_told_not_to_run_foreach_loops(form: Any) -> None:
    found = check_optimizer(form([nn.Parameter(torch.zeros(2))], foreach=False))
    assert found == form.__name__.lower() + "-loop"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (torch.optim.AdamW, "adamw"),
        ("torch.optim.AdamW(lr=1e-3, fused=True)", "adamw-fused"),
        ("AdamW(fused=False)", "adamw"),
        ("Adam(foreach = False)", "adam-loop"),
        ("SGD(model.parameters(), 0.1, momentum=0.9)", "sgd-momentum"),
        ("SGD(lr=0.1, momentum=0)", "sgd"),
    ],
)
def test_an_optimizer_is_named_as_torch_writes_it(written: Any, name: str) -> None:
    assert check_optimizer(written) == name


def test_optimizers_of_other_packages_are_known_by_their_classes() -> None:
    found = {name: check_optimizer(name) for name in ("FusedLAMB", "AdamW8bit", "Muon")}
    assert found == {"FusedLAMB": "lamb", "AdamW8bit": "adamw-8bit", "Muon": "muon"}
    with pytest.raises(StrategyError, match="adamw-8bit, adamw-bf16, lamb, muon"):
        check_optimizer("lion")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_as_many_as_torch_keeps(optimizer: str, dtype: torch.dtype) -> None:
    forms: dict[str, Any] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adam-fused": lambda p: torch.optim.Adam(p, fused=True),
        "adamw-fused": lambda p: torch.optim.AdamW(p, fused=True),
        "sgd-loop": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        "sgd-momentum-loop": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "adam-loop": lambda p: torch.optim.Adam(p, foreach=False),
        "adamw-loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "muon": torch.optim.Muon,
    }
    if optimizer not in forms:
        pytest.skip(f"torch has no {optimizer}")
    weight = nn.Parameter(torch.randn(64, 32, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    step = forms[optimizer]([weight])
    step.step()
    kept = [state.nbytes for state in step.state[weight].values() if state.dim() == 2]
    assert sorted(kept) == sorted(
        state_sizes(optimizer, OptimizedTensor((64, 32), 2048, weight.nbytes))
    )


def test_8_bit_states_are_a_byte_and_a_scale_for_256_elements() -> None:
    # 524,288 elements and 2048 scales of 4 bytes; under 4096 elements both states stay in fp32.
    assert state_sizes("adamw-8bit", MATRIX) == (524_288 + 8192,) * 2
    assert state_sizes("adamw-8bit", VECTOR) == (4000, 4000)


def test_bf16_moments_take_two_bytes_and_a_master_weight_two_more() -> None:
    # Megatron-Core's precision-aware optimizer: 2 + 2 for moments, 2 beyond the bf16 weight.
    assert state_sizes("adamw-bf16", MATRIX) == (2 * 524_288,) * 2
    assert master_size("adamw-bf16", MATRIX) == 2 * 524_288
    assert master_size("adamw-fused", MATRIX) == 4 * 524_288


def test_muon_has_one_state_for_matrices_of_blocks_and_adamw_two_for_the_rest() -> None:
    assert state_sizes("muon", MATRIX) == (MATRIX.size_bytes,)
    assert state_sizes("muon", VECTOR) == (4000, 4000)
    assert state_sizes("muon", EMBEDDING) == (EMBEDDING.size_bytes,) * 2


@pytest.mark.parametrize(
    ("optimizer", "fp32_bytes", "bf16_bytes"),
    [
        # Read parameter, gradient and two moments, write all but the gradient: 7 tensors.
        ("adamw-fused", 28, 14),
        # Foreach: mul 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4.
        ("adamw", 80, 40),
        # Parameter twice, gradient once; two states of 1 + 4/256 bytes, read and written.
        ("adamw-8bit", 12 + 4.0625, 6 + 4.0625),
        # Weight, remainder, gradient, two moments in bf16 read, all but the gradient written.
        ("adamw-bf16", 18, 18),
        # Three norms, seven tensors in stage one, three in stage two.
        ("lamb", 52, 26),
    ],
)
def test_an_update_moves_what_its_kernels_read_and_write(
    optimizer: str, fp32_bytes: float, bf16_bytes: float
) -> None:
    assert RULES[optimizer].bytes_of(4) == fp32_bytes
    assert RULES[optimizer].bytes_of(2) == bf16_bytes


@pytest.mark.parametrize(
    ("optimizer", "made"),
    [
        ("sgd-loop", lambda own: torch.optim.SGD(own, foreach=False)),
        ("sgd", lambda own: torch.optim.SGD(own, foreach=True)),
        ("sgd-momentum", lambda own: torch.optim.SGD(own, momentum=0.9, foreach=True)),
        ("adam", lambda own: torch.optim.Adam(own, foreach=True)),
        ("adamw-loop", lambda own: torch.optim.AdamW(own, foreach=False)),
        ("adamw", lambda own: torch.optim.AdamW(own, foreach=True)),
        ("adamw-fused", lambda own: torch.optim.AdamW(own, fused=True)),
    ],
)
def test_dtensor_sums_a_partial_gradient_as_often_as_an_update_reads_it(
    optimizer: str, made: Callable[[Any], torch.optim.Optimizer]
) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        vector = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
        update = made([vector])
        # The first update makes the states.
        for _ in range(2):
            vector.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
            with CommDebugMode() as seen:
                update.step()
    finally:
        dist.destroy_process_group()
    assert seen.get_total_counts() == RULES[optimizer].gradient_reads


def test_temporaries_are_of_all_parameters_or_of_one_at_a_time() -> None:
    both = [VECTOR, MATRIX]
    # Foreach takes every root at once, the fused kernel none.
    assert temporaries_bytes("adamw", both, foreach=True) == (4000 + MATRIX.size_bytes, 0)
    assert temporaries_bytes("adamw-fused", both, foreach=True) == (0, 0)
    # The loop goes from the last to the first: the matrix' root and quotient are the most, then
    # the vector's beside the matrix' root.
    assert temporaries_bytes("adamw", both, foreach=False) == (0, 2 * MATRIX.size_bytes)
    # Muon: the update in fp32, X and the next X in bf16, two squares of 512 x 512 in bf16; the
    # vector's root by AdamW.
    own = 4 * 1024 * 512 + 2 * 2 * 1024 * 512 + 2 * 2 * 512 * 512
    assert temporaries_bytes("muon", both, foreach=True) == (4000, own)


def test_an_option_of_an_optimizer_is_written_once() -> None:
    with pytest.raises(StrategyError, match="an optimizer's fused stands twice; write it once"):
        check_optimizer("AdamW(lr=1e-3, fused=True, fused=False)")
