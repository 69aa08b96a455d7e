"""Set-ups of users are answered as they are, or refused by a sentence that names the change."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
from traced_models import define_torchvision_schemas

from estimator.cli.main import main as command
from tests.setups import user_setups, user_steps

ALLOCATION = "1x2:a100-sxm-40gb"
# What the sentence must name for those that cannot be answered as they are.
REFUSED = {
    "lightning_gan": "step(models, batch)",
    "no_loss": "give the loss",
    "no_batch": "return (model, batch)",
    "optimizer_too": "--optimizer",
    "models_without_step": "return (models, batch, step)",
    "only_a_trainer": "return (model, batch)",
    "loss_class": "write CrossEntropyLoss()",
    "step_that_logs": "leave out what reads it, such as .item()",
}
SETUPS: dict[str, Callable[[], Any]] = {
    name: value
    for module in (user_setups, user_steps)
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and value.__module__ == module.__name__
    and not name.startswith("_")
}
# Where a package is missing these say so; the others need torch alone.
OTHERS = ("torchvision", "timm", "peft", "lightning", "torch_geometric", "_gpt2", "accelerate")


def ask(name: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line asked about one set-up."""
    path = inspect.getfile(SETUPS[name])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command(["estimate", f"{path}:{name}", "--on", ALLOCATION])
        except SystemExit as end:
            return int(end.code or 0), out.getvalue().strip(), err.getvalue().strip()


def test_there_are_at_least_sixty_set_ups() -> None:
    assert len(SETUPS) >= 60
    assert set(REFUSED) <= set(SETUPS)


# What torch warns of in a user's code is no failure of the trace.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SETUPS)
def test_a_set_up_is_answered_or_refused_with_what_to_change(name: str) -> None:
    source = inspect.getsource(SETUPS[name])
    if "torchvision" in source:
        pytest.importorskip("torchvision")
        define_torchvision_schemas()
    if "_trainer" in source:
        pytest.importorskip("accelerate")
    code, out, err = ask(name)
    if "ModuleNotFoundError" in err and any(each in source for each in OTHERS):
        pytest.skip(err)
    if name in REFUSED:
        assert code == 2, out
        assert "\n" not in err
        assert REFUSED[name] in err
    else:
        assert code == 0, err
        assert "step time" in out
