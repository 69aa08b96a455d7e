"""Train a small model on one of six kinds of data: ``loaders.py KIND WORKERS FOLDER [loader]``.

With ``loader`` it measures the loader by `estimator.measure_loader` and prints it as JSON instead.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

BATCH, SAMPLES, PIXELS, TOKENS, FIELDS = 16, 4096, 128, 256, 64


class Samples(Dataset[Any]):
    """As many as a run takes, however few are on the disk."""

    def __len__(self) -> int:
        return SAMPLES


class Folder(Samples):
    """JPEG files, decoded and resized."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted((folder / "jpeg").glob("*.jpg"))

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index % len(self.paths)]) as image:
            pixels = np.asarray(image.convert("RGB").resize((PIXELS, PIXELS)))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255


class Crops(Folder):
    """The same with random crops and flips in Python."""

    def __getitem__(self, index: int) -> torch.Tensor:
        image = super().__getitem__(index)
        top, left = random.randrange(16), random.randrange(16)
        crop = image[:, top : top + 112, left : left + 112]
        crop = crop.flip(2) if random.random() < 0.5 else crop
        return nn.functional.pad(crop, (8, 8, 8, 8))


class Text(Samples):
    """Lines of text, split into words and looked up in a vocabulary."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / "text.txt").read_text().splitlines()
        self.numbers = {f"w{number}": number for number in range(5000)}

    def __getitem__(self, index: int) -> torch.Tensor:
        words = [w for row in range(8) for w in self.lines[(index + row) % 512].split()]
        return torch.tensor([self.numbers[word] for word in words[:TOKENS]])


class Records(Samples):
    """Rows of a memory-mapped array."""

    def __init__(self, folder: Path) -> None:
        self.rows = np.load(folder / "records.npy", mmap_mode="r")

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[index % len(self.rows)].astype(np.float32))


class Shuffled(IterableDataset[Any]):
    """A stream of records through a shuffle buffer, a part of it on each worker."""

    def __init__(self, folder: Path) -> None:
        self.records = Records(folder)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        buffer: list[torch.Tensor] = []
        for index in range(first, SAMPLES, step):
            buffer.append(self.records[index])
            if len(buffer) > 64:
                yield buffer.pop(random.randrange(64))
        yield from buffer


class Table(Samples):
    """Lines of comma-separated values, parsed one by one."""

    def __init__(self, folder: Path) -> None:
        self.lines = (folder / "table.csv").read_text().splitlines()

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(value) for value in self.lines[index % 512].split(",")])


KINDS: dict[str, Any] = {
    "jpeg": Folder,
    "crops": Crops,
    "text": Text,
    "records": Records,
    "shuffled": Shuffled,
    "table": Table,
}


def write_data(folder: Path) -> None:
    """The files of all kinds, the same in every run."""
    draw = np.random.default_rng(0)
    (folder / "jpeg").mkdir(parents=True, exist_ok=True)
    for number in range(64):
        coarse = draw.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((320, 240))
        image.save(folder / "jpeg" / f"{number}.jpg", quality=90)
    words = draw.integers(0, 5000, (512, 32))
    lines = (" ".join(f"w{word}" for word in row) for row in words)
    (folder / "text.txt").write_text("\n".join(lines))
    np.save(folder / "records.npy", draw.normal(size=(2048, 3, 64, 64)).astype(np.float16))
    rows = draw.normal(size=(512, FIELDS))
    (folder / "table.csv").write_text("\n".join(",".join(f"{v:.6f}" for v in row) for row in rows))


def model_of(kind: str) -> nn.Module:
    """A model for the kind's batches whose step takes some ten milliseconds on one core."""
    if kind == "text":
        return nn.Sequential(nn.Embedding(5000, 128), nn.Linear(128, 512), nn.Linear(512, 128))
    if kind == "table":
        return nn.Sequential(nn.Linear(FIELDS, 2048), nn.ReLU(), nn.Linear(2048, 2048))
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.Flatten())


def main() -> None:
    """Train until the hooks end it, or measure the loader."""
    kind, workers, folder, *measured = sys.argv[1:]
    torch.manual_seed(0)
    dataset = KINDS[kind](Path(folder))
    loader = DataLoader(dataset, batch_size=BATCH, num_workers=int(workers))
    if measured:
        import estimator

        print(json.dumps(estimator.measure_loader(loader).to_dict()))
        return
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(100):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
