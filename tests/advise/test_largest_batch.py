"""The largest batch: against every batch around it, and refused where there is none to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

import estimator as est
from estimator.advise.scaling import largest_batch
from estimator.errors import WorkloadError
from tests.synthetic import Machine, perceptron


def test_one_sample_more_does_not_fit() -> None:
    graph = perceptron([256, 1024, 256], batch=4)
    profile = Machine(devices=1).profile()
    # 525,568 parameters, their gradients and two states take 8.4 MB; the rest is for activations.
    small = replace(profile, devices=(replace(profile.devices[0], memory_bytes=16 << 20),))
    found = largest_batch(graph, "1x1:synthetic", profile=small)
    assert 0 < found.batch_per_gpu < found.at_most
    answers = {
        batch: est.estimate(graph, "1x1:synthetic", batch_per_gpu=batch, profile=small)
        for each in (found.batch_per_gpu, found.at_most)
        for batch in (each, each + 1)
    }
    assert answers[found.batch_per_gpu].fits == "yes"
    assert answers[found.batch_per_gpu + 1].fits != "yes"
    assert answers[found.at_most].peak_memory_bytes <= 16 << 20
    assert answers[found.at_most + 1].peak_memory_bytes > 16 << 20


def test_a_model_whose_parameters_do_not_fit_has_no_batch() -> None:
    graph = perceptron([256, 1024, 256], batch=4)
    profile = Machine(devices=1).profile()
    small = replace(profile, devices=(replace(profile.devices[0], memory_bytes=1 << 20),))
    found = largest_batch(graph, "1x1:synthetic", profile=small)
    assert (found.batch_per_gpu, found.at_most, found.answer) == (0, 0, None)


def test_a_fixed_batch_is_refused() -> None:
    graph = replace(perceptron([4, 4], batch=4), batch=None)
    with pytest.raises(WorkloadError, match="fixed batch"):
        largest_batch(graph, "1x1:synthetic", profile=Machine(devices=1).profile())
