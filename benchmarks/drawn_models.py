"""Draw models that nobody has tuned to: architectures of timm and transformers, at random sizes.

A drawn name says how its model is built, and is a function of this module: the MODEL text
``benchmarks/drawn_models.py:timm,resnet18,batch=4,size=0.75``. Run it where timm is.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from records import Record, Records, say
from torch import nn
from traced_models import answer, ask_all, define_torchvision_schemas, names_of, positions_of

# What a step of AdamW in float32 can hold several times over on a small machine.
MOST_PARAMETERS = 150_000_000
SHORTEST_STEP_S, LONGEST_STEP_S = 0.05, 3.0
# Of processor time, for a model to be built and to train two steps.
TRIAL_S = 60.0
CANDIDATES_PER_MODEL = 20
BATCHES = (1, 2, 4, 8, 16)
CLASSES = 100
# Of an architecture's own: the side of its images, its layers, its widths, the longest text.
IMAGE_RATIOS = (0.5, 0.75, 1.0)
LAYER_RATIOS = (0.25, 0.5, 0.75, 1.0)
WIDTH_RATIOS = (0.25, 0.5, 0.75, 1.0)
LENGTHS = (32, 64, 128, 256, 512)
IMAGE_UNIT = 32
DEEP = ("num_hidden_layers",)
WIDE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def candidates(count: int, seed: int) -> list[str]:
    """So many names, of timm and transformers by turns, at random sizes."""
    rng = random.Random(seed)
    known = {suite: names_of(suite) for suite in ("timm", "transformers")}
    found = []
    for number in range(count):
        suite = ("timm", "transformers")[number % 2]
        name = f"{suite},{rng.choice(known[suite])},batch={rng.choice(BATCHES)}"
        if suite == "timm":
            name += f",size={rng.choice(IMAGE_RATIOS)}"
        else:
            name += f",length={rng.choice(LENGTHS)},layers={rng.choice(LAYER_RATIOS)}"
            name += f",width={rng.choice(WIDTH_RATIOS)}"
        found.append(name)
    return found


def drawn(count: int, seed: int, records: Records) -> list[str]:
    """The first candidates that train here in steps of the wanted length, half of each suite.

    What was tried before is read from the records, and what is tried now is added to them.
    """
    names = candidates(CANDIDATES_PER_MODEL * count, seed)
    suites = [tried(names[first::2], records, __file__) for first in range(2)]
    return [next(suites[number % 2])["key"] for number in range(count)]


def tried(names: Sequence[str], records: Records, script: str) -> Iterator[Record]:
    """What a script finds of those names that are of use, in their order; each is tried once."""
    known = {record["key"]: record for record in records.of("drawn")}
    asked = ask_all([sys.executable, script], [name for name in names if name not in known])
    for name in names:
        if name not in known:
            known[name] = {"kind": "drawn", "key": name, **next(asked)[1]}
            records.add(known[name])
            say(f"drew {name}: {known[name]['status']} {known[name].get('reason', '')[:200]}")
        if known[name]["status"] == "ok":
            yield known[name]
    raise SystemExit("too few of the drawn models can be trained here; draw fewer")


def try_out(name: str) -> Record:
    """Train two steps; the processor time of the second tells whether the model is of use."""
    signal.setitimer(signal.ITIMER_PROF, TRIAL_S)
    torch.manual_seed(0)
    model, batch, loss = build(name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > MOST_PARAMETERS:
        return {"status": "passed over", "reason": f"{parameters} parameters"}
    from estimator.graph.trace.training_call import TrainingCall

    call = TrainingCall.of(model, batch, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(2):
        begun = time.process_time()
        optimizer.zero_grad()
        call.run(model, call.batch).backward()
        optimizer.step()
        step_s = time.process_time() - begun
    if not SHORTEST_STEP_S <= step_s <= LONGEST_STEP_S:
        return {"status": "passed over", "reason": f"a step of {1e3 * step_s:.0f} ms"}
    return {"status": "ok", "step_s": step_s, "parameters": parameters}


def __getattr__(name: str) -> Callable[[], Any]:
    """The function that builds the model of a drawn name."""
    if not name.startswith(("timm,", "transformers,")):
        raise AttributeError(name)
    return lambda: build(name)


def build(
    name: str, samples: int | None = None, *, again: bool = False
) -> tuple[nn.Module, Any, Any]:
    """(model, batch, loss) of a drawn name, at its batch or another; `again` with checkpoints."""
    define_torchvision_schemas()
    suite, architecture, *settings = name.split(",")
    given = dict(setting.split("=") for setting in settings)
    batch = samples or int(given["batch"])
    if suite == "timm":
        built = _timm(architecture, batch, float(given["size"]))
        if again:
            built[0].set_grad_checkpointing()  # type: ignore[operator]
        return built
    ratios = {field: float(given["layers"]) for field in DEEP}
    ratios |= {field: float(given["width"]) for field in WIDE}
    return _transformers(architecture, batch, int(given["length"]), ratios, again=again)


def _timm(name: str, batch: int, ratio: float) -> tuple[nn.Module, Any, Any]:
    """An image classifier on smaller images, where it takes them."""
    import timm

    configuration = timm.models.get_pretrained_cfg(name)
    size = configuration.input_size if configuration else (3, 224, 224)
    side = max(IMAGE_UNIT, int(size[1] * ratio) // IMAGE_UNIT * IMAGE_UNIT)
    try:
        model = timm.create_model(name, num_classes=CLASSES, img_size=side)
    except TypeError:  # convolutional networks take any size and no such argument
        model = timm.create_model(name, num_classes=CLASSES)
        if (configuration and configuration.fixed_input_size) or ratio == 1.0:
            side = size[1]
    return model.train(), torch.randn(batch, size[0], side, side), _class_loss


def _class_loss(scores: torch.Tensor, _images: torch.Tensor) -> torch.Tensor:
    labels = torch.arange(len(scores), device=scores.device)
    return nn.functional.cross_entropy(scores, labels)


def _transformers(
    kind: str, batch: int, length: int, ratios: dict[str, float], *, again: bool
) -> tuple[nn.Module, Any, Any]:
    """A type's default head, with the fields of its configuration that it has scaled."""
    from transformers.models.auto import configuration_auto

    from estimator.graph.models import load_model

    configuration = configuration_auto.CONFIG_MAPPING[kind]()
    settings = "".join(
        f",{field}={max(1, round(value * ratio))}"
        for field, ratio in ratios.items()
        if isinstance(value := getattr(configuration, field, None), int)
    )
    settings += ",gradient_checkpointing=true" * again
    length = min(length, positions_of(kind))
    return load_model(f"hf:{kind}{settings}", batch=batch, seq_len=length)[:3]


if __name__ == "__main__":
    answer(try_out)
