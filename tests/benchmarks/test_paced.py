"""Paced layers: when each piece of their work is over, and what blocks it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from testbed import paced


class Clock:
    """Time that passes only in sleeping; stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(paced, "time", found)
    monkeypatch.setattr(paced, "pace", paced.Pace())
    return found


def collective_of(clock: Clock, seconds: float, answer: object):
    """An all-reduce that keeps its caller for some time."""

    def all_reduce(tensor, async_op=False):
        clock.sleep(seconds)
        return answer

    return all_reduce


def two_pieces_around(collective_arguments: tuple[object, ...]) -> None:
    with paced.pausing_at_collectives():
        paced.pace.begin_step()
        paced.pace.wait(2.0)
        dist.all_reduce(*collective_arguments)
        paced.pace.wait(3.0)


def test_work_after_a_collective_that_blocks_begins_when_that_is_over(clock, monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", collective_of(clock, 5.0, None))
    two_pieces_around((torch.ones(1),))
    assert clock.now_s == pytest.approx(2.0 + 5.0 + 3.0)
    assert paced.pace.lateness_s[-1] == 0.0


def test_what_a_thread_does_before_it_is_blocked_is_hidden_behind_its_work(
    clock, monkeypatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", collective_of(clock, 5.0, None))
    with paced.pausing_at_collectives():
        paced.pace.begin_step()
        paced.pace.wait(2.0)
        clock.sleep(1.0)
        dist.all_reduce(torch.ones(1))
        paced.pace.wait(3.0)
    assert clock.now_s == pytest.approx(2.0 + 5.0 + 3.0)


def test_starting_a_collective_that_does_not_block_is_hidden_behind_the_work(
    clock, monkeypatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", collective_of(clock, 1.0, object()))
    two_pieces_around((torch.ones(1), True))
    assert clock.now_s == pytest.approx(2.0 + 3.0)


def test_collectives_are_afterwards_what_they_were(clock) -> None:
    before = dist.all_reduce, dist.broadcast, dist.reduce_scatter_tensor
    with paced.pausing_at_collectives():
        assert dist.all_reduce is not before[0]
    assert (dist.all_reduce, dist.broadcast, dist.reduce_scatter_tensor) == before


def two_layers() -> tuple[paced.PacedModel, torch.Tensor]:
    """Layers of 2 s forward and 6 s backward each, at one sample."""
    layers = [paced.PacedLayer([(3, 2), (3,)], 2.0, 3.0) for _ in range(2)]
    return paced.PacedModel(*layers), torch.zeros(1, 4)


def test_gradients_of_the_input_come_before_those_of_the_weights(clock) -> None:
    model, batch = two_layers()
    ready: list[tuple[str, float]] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ready.append((name, clock.now_s))
        )
    paced.pace.begin_step()
    loss = model(batch).mean()
    assert clock.now_s == pytest.approx(2 * 2.0)
    loss.backward()
    # 3 s for the gradient of layer 1's input, 3 s for its weights, then 3 s for layer 0's weights:
    # nothing asks for the gradient of the batch.
    assert dict(ready) == {
        "1.weights.0": 10.0,
        "1.weights.1": 10.0,
        "0.weights.0": 13.0,
        "0.weights.1": 13.0,
    }
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_either_gradient_of_a_layer_can_be_had_without_the_other(clock) -> None:
    model, batch = two_layers()
    paced.pace.begin_step()
    hidden = model[0](batch)
    output = model[1](hidden).mean()
    assert clock.now_s == pytest.approx(4.0)
    (gradient,) = torch.autograd.grad(output, hidden, retain_graph=True)
    assert gradient.shape == hidden.shape
    assert clock.now_s == pytest.approx(4.0 + 3.0)
    torch.autograd.grad(output, list(model[1].parameters()))
    assert clock.now_s == pytest.approx(4.0 + 3.0 + 3.0)


def test_a_slow_node_waits_longer_for_its_work_and_not_for_collectives(clock, monkeypatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", collective_of(clock, 5.0, None))
    paced.pace.slowdown_ratio = 1.5
    two_pieces_around((torch.ones(1),))
    assert clock.now_s == pytest.approx(1.5 * 2.0 + 5.0 + 1.5 * 3.0)


def test_a_rank_that_cannot_keep_up_says_so(clock) -> None:
    paced.pace.begin_step()
    clock.sleep(4.0)
    paced.pace.wait(3.0)
    assert paced.pace.lateness_s[-1] == pytest.approx(1.0)


def test_layers_share_the_memory_of_their_gradients_and_weights_of_one_layer_do_not(clock) -> None:
    layers = [paced.PacedLayer([(5,), (5,)], 1.0, 2.0) for _ in range(2)]
    model = paced.PacedModel(*layers)
    model(torch.zeros(1, 4)).mean().backward()
    pointers = [parameter.grad.data_ptr() for parameter in model.parameters()]
    assert pointers[:2] == pointers[2:]
    assert pointers[0] != pointers[1]
