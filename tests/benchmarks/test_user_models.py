"""Set-ups of users that need torch alone are answered as they are, or told what to change."""

from __future__ import annotations

import inspect

import pytest
import user_models

# What needs other packages is run by the benchmark, in an environment that has them.
OTHERS = (
    "torchvision",
    "timm",
    "peft",
    "lightning",
    "torch_geometric",
    "_gpt2",
    "accelerate",
    "_trainer",
)
PLAIN = [
    name
    for name, setup in user_models.setups().items()
    if not any(each in inspect.getsource(setup) for each in OTHERS)
]


def test_there_are_at_least_thirty_set_ups() -> None:
    assert len(user_models.setups()) >= 30
    assert len(PLAIN) >= 45
    assert set(user_models.REFUSED) <= set(user_models.setups())


# What torch warns of in a user's code is no failure of the trace.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_a_set_up_is_answered_or_refused_with_what_to_change(name: str) -> None:
    status, said = user_models.run(name)
    assert status == ("refused" if name in user_models.REFUSED else "answered"), said
