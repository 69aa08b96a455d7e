"""Read what was published of collectives: seconds by bytes of each group of devices."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from estimator.machines.profile import CollectiveName
from estimator.timeline.collectives.costs import RING_SHARE

# The same cluster goes by a name for each of its groups.
_GROUP_IN_NAME = re.compile(r"^\d+x (?=DGX A100$|AWS)|^\d+ node x \d+ GPU | \(\d+ GPUs\)$")

Points = dict[int, float]


@dataclass(frozen=True, slots=True)
class Group:
    """What was published of one collective over one group shape: seconds by bytes."""

    source: str
    system: str
    op: CollectiveName
    dtype: str
    nodes: int
    ranks: int
    points: Points

    @property
    def per_node(self) -> int:
        return -(-self.ranks // self.nodes)

    @property
    def name(self) -> str:
        return f"{self.system}, {self.op} {self.dtype}, {self.nodes}x{self.per_node}"


def read_groups(path: Path) -> list[Group]:
    """Every group of the table whose collective a profile can hold."""
    points: dict[tuple[str, str, str, str, int, int], Points] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["collective"] in RING_SHARE and float(row["time_us"]) > 0:
                system = _GROUP_IN_NAME.sub("", row["system"])
                shape = int(row["nodes"]), int(row["ranks"])
                key = (row["source"], system, row["collective"], row["dtype"], *shape)
                points[key][int(row["size_bytes"])] = float(row["time_us"]) * 1e-6
    return [Group(*key, found) for key, found in points.items()]  # type: ignore[arg-type]
