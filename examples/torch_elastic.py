"""Launch an elastic job between the fewest nodes that hold it and the most that it uses well.

``python examples/torch_elastic.py MACHINE MAX_NODES`` prints the ``torchrun`` command of each node.
With ``local 1`` (after ``estimator probe``) it also runs it: this file is then the script.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from demo_models import gpt2
from torch.nn.parallel import DistributedDataParallel

import estimator as est
from estimator.integrations.schedulers.launchers import sizes, torchrun

LAYERS, VOCABULARY, STEPS = 1, 1000, 3


def train() -> None:
    """What each rank runs."""
    dist.init_process_group("gloo")
    plain, batch = gpt2(4, layers=LAYERS, vocabulary=VOCABULARY)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"trained {STEPS} steps on {dist.get_world_size()} ranks")
    dist.destroy_process_group()


def main(machine: str, max_nodes: int) -> None:
    """Print how to launch, and launch here if that is here."""
    target = est.load_profile(machine).kind
    graph = est.trace_model(*gpt2(4, layers=LAYERS, vocabulary=VOCABULARY), target=target)
    words = [*torchrun(sizes(graph, machine, max_nodes=max_nodes)), __file__]
    print(*words, flush=True)
    if machine == "local":
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *words[1:]], check=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        main(sys.argv[1], int(sys.argv[2]))
