"""Model code that does what none should, as the text of one file."""

from __future__ import annotations

import random
import re

MODELS = """
import sys
import torch
from torch import nn

def mlp(batch=4):
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(batch, 8)

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("not even that")

class Beyond(BaseException):
    pass

class Branching(nn.Linear):
    def forward(self, x):
        if x.sum().item() > 0:
            return super().forward(x) * 2
        return super().forward(x)

def prints():
    print("loading", flush=True)
    sys.stdout.write("more\\n")
    return mlp()

def prints_while_it_runs():
    class Loud(nn.Linear):
        def forward(self, x):
            print("step")
            return super().forward(x)
    return Loud(8, 4), torch.randn(4, 8)

def raises_beyond():
    raise Beyond("beyond")

def raises_silently():
    raise Silent

def raises_with_escapes():
    raise ValueError("\\x1b[31mred\\x1b[0m\\nand more" + "x" * 10000)

def exits():
    sys.exit(0)

def recurses():
    return recurses()

def branches():
    return Branching(8, 4), torch.randn(4, 8)

def has_no_sample():
    return mlp()[0], torch.randn(0, 8)

def has_a_scalar():
    return mlp()[0], torch.tensor(1.0)

def has_a_batch_in_itself():
    batch = [torch.randn(4, 8)]
    batch.append(batch)
    return mlp()[0], batch

def has_a_deep_batch():
    batch = torch.randn(4, 8)
    for _ in range(2000):
        batch = [batch]
    return mlp()[0], batch

def is_quantised():
    return mlp()[0], torch.quantize_per_tensor(torch.randn(4, 8), 0.1, 0, torch.qint8)

def is_sparse():
    return mlp()[0], torch.randn(4, 8).to_sparse()

def is_double():
    return mlp()[0].double(), torch.randn(4, 8, dtype=torch.float64)

def is_half():
    return mlp()[0].half(), torch.randn(4, 8, dtype=torch.float16)

def is_complex():
    return nn.Linear(8, 4, dtype=torch.complex64), torch.randn(4, 8, dtype=torch.complex64)

def is_mixed():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4).double()), torch.randn(4, 8)

def returns_itself():
    found = []
    found += [found, found]
    return found

def has_escapes_in_its_name():
    model, batch = mlp()
    model.add_module("\\x1b[31m", nn.Linear(4, 4))
    return model, batch

def closes_stdout():
    sys.stdout.close()
    return mlp()

def replaces_stdout():
    sys.stdout = None
    return mlp()

def has_empty_layers():
    return nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4)), torch.randn(4, 8)

def has_an_infinite_loss():
    model, batch = mlp()
    return model, batch, lambda output, batch: (output / 0).sum()

def has_a_loss_of_text():
    model, batch = mlp()
    return model, batch, lambda output, batch: "low"

def has_a_raising_property():
    class Odd(nn.Linear):
        @property
        def training(self):
            raise Silent
    return Odd(8, 4), torch.randn(4, 8)

def generates():
    yield mlp()

def has_a_batch_of_one_that_cannot_be_doubled():
    class One(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(1, 8))
    return One(8, 4), torch.randn(1, 8)
"""
FUNCTIONS = tuple(re.findall(r"^def (\w+)", MODELS, flags=re.MULTILINE))

# The parameters of a forward, what it returns, and how it finds its input among them.
_FORWARDS = (
    *(("x", "x"), ("x", "x"), ("x", "x[0]"), ("x", "torch.cat(list(x), 0)")),
    *(("*parts", "parts[0]"), ("x, y", "x"), ("x, y=None", "x + (0 if y is None else y.sum())")),
    *(("x, *, y", "x"), ("", "x"), ("**parts", "parts['x']"), ("x=None, labels=None", "x")),
    ("input_ids", "input_ids.float()"),
)
_OUTPUTS = (
    *("{0}", "{0}", "{0}", "{0}", "{{'loss': {0}.mean()}}", "[{0}, None]", "{0}.argmax(-1)"),
    *("None", "({0} for _ in range(2))", "{0}.detach()", "({0}, {{'aux': 3}})"),
    *("{0}.sum().item()", "{0} * 1j"),
)
_TENSORS = (
    *["torch.randn(4, 8)"] * 12,
    *("torch.randint(4, (4,))", "torch.randn(4, 4)") * 4,
    *("torch.randn(0, 8)", "torch.randn(4, 8, 0)", "torch.tensor(1.0)", "torch.randn(8)", "None"),
    *("3", "'text'", "torch.randn(4, 8, device='meta')", "torch.randn(4, 8).to_sparse()", "2.5"),
    *("b'x'", "torch.randn(4, 8, dtype=torch.complex64)", "torch.zeros(4, 8, dtype=torch.bool)"),
    *("object()", "torch.randn(4, 8).expand(3, 4, 8)", "torch.randn(1 << 12, 8)"),
    *("numpy.zeros((4, 8))", "torch.randn(4, 8, requires_grad=True)", "torch.full((4,), 10**12)"),
    *("torch.randn(4, 8).T", "torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])"),
)
_LOSSES = (
    *("None", "None", "nn.CrossEntropyLoss()", "nn.MSELoss()", "nn.BCEWithLogitsLoss()"),
    *("nn.L1Loss()", "lambda output, target: output.mean()", "lambda output: output"),
    *("lambda *both: both[0]", "lambda output, target: 1 / 0", "lambda output, target: None"),
    *("nn.MSELoss(reduction='none')", "lambda output, target: float(output.mean())", "print"),
    *("nn.CTCLoss()", "nn.MSELoss"),
    "lambda output, target: nn.functional.mse_loss(output, target)",
)
_DATASETS = (
    "[]", "[1, 2]", "range(9)", "[(torch.randn(8), 1)] * 9",
    "[[torch.randn(8), torch.randn(4)]] * 9",
    "[{'x': torch.randn(8), 'y': 0}] * 9", "[torch.randn(n, 8) for n in range(1, 9)]", "Raises()",
    "['text'] * 9", "Endless()", "Liar()",
)  # fmt: skip
_MADE = """
import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Raises(Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        raise SystemExit(index)

class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(8), torch.randn(4)

class Liar(Dataset):
    def __len__(self):
        return 10**12
    def __getitem__(self, index):
        raise IndexError

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, {parameters}):
        return {output}
    {step}

def made(batch=4):
    return Net(), {batch}, {loss}
"""
_STEPS = (
    *("", "", "", "", "", "", "def training_step(self, batch, index): return self(batch).mean()"),
    "def training_step(self, batch): return self(*batch).mean()",
    "def training_step(self, batch, index): return {'loss': self(batch[0]).mean()}",
    "training_step = 3",
)


def made_model(chance: random.Random) -> str:
    """The text of a file whose `made` joins a forward, a batch and a loss that may not fit."""
    is_plain = chance.random() < 0.5
    parameters, found = ("x", "x") if is_plain else chance.choice(_FORWARDS)
    return _MADE.format(
        parameters=parameters,
        output=("{0}" if is_plain else chance.choice(_OUTPUTS)).format(f"self.layer({found})"),
        step=chance.choice(_STEPS),
        batch=_batch(chance, 0),
        loss=chance.choice(_LOSSES),
    )


def _batch(chance: random.Random, depth: int) -> str:
    how = chance.random()
    if depth > 2 or how < 0.2:
        return chance.choice(_TENSORS)
    if how < 0.35 and not depth:
        options = chance.choice(
            ("", ", batch_size=4", ", batch_size=None", ", batch_size=4, drop_last=True")
        )
        return f"DataLoader({chance.choice(_DATASETS)}{options})"
    if how < 0.4 and not depth:
        return chance.choice(("Raises()", "Endless()", "Liar()", "iter([torch.randn(4, 8)])"))
    parts = [_batch(chance, depth + 1) for _ in range(chance.choice((0, 1, 2, 2, 2, 3)))]
    if how < 0.7:
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if how < 0.85:
        return f"[{', '.join(parts)}]"
    names = chance.sample(("x", "y", "parts", "input_ids", "labels", "", "1", "self"), len(parts))
    return "{" + ", ".join(f"{n!r}: {part}" for n, part in zip(names, parts, strict=True)) + "}"
