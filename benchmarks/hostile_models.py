"""Model code that does what none should, as the text of one file."""

from __future__ import annotations

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
