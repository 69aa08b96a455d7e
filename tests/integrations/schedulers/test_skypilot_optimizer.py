"""SkyPilot's own optimizer, asked by the example, chooses by our times and the shipped prices."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from estimator import estimate
from tests.synthetic import perceptron

ROOT = Path(__file__).resolve().parents[3]
TYPES = {"g4dn.12xlarge", "p3.8xlarge", "p4d.24xlarge"}
# SkyPilot reads its home when it is imported, and asks clouds which of them it may use.
SCRIPT = """
import json, sys
from sky import check, clouds
from skypilot_task import choose
from estimator.graph.ir.op_graph import OpGraph

check.get_cached_enabled_clouds_or_refresh = lambda *words, **options: [clouds.AWS()]
graph = OpGraph.load(sys.argv[1])
chosen = {
    target: choose(graph, samples=1e9, nodes=2, target=target).instance_type
    for target in ("TIME", "COST")
}
print(json.dumps(chosen))
"""


@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="skypilot is not installed")
def test_its_optimizer_takes_the_fastest_or_the_cheapest(tmp_path: Path) -> None:
    graph = replace(perceptron([256, 256], batch=256), target="cuda")
    graph.save(tmp_path / "net.graph")
    catalogue = tmp_path / ".sky/catalogs/v8/aws/vms.csv"
    names = tmp_path / ".sky/catalogs/v8/common/accelerators.csv"
    for path in (catalogue, names):
        path.parent.mkdir(parents=True)
    names.write_text("AcceleratorName,Clouds\nT4,AWS\nV100,AWS\nA100,AWS\n")
    with (ROOT / "data/prices/instances.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["InstanceType"] in TYPES]
    usd = {row["InstanceType"]: float(row["Price"]) for row in rows}
    with catalogue.open("w") as file:
        columns = list(rows[0])[: list(rows[0]).index("Cloud")]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "net.graph")],
        env=os.environ
        | {
            "HOME": str(tmp_path),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "ESTIMATOR_HOME": str(tmp_path / "store"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    time_s = {
        row["InstanceType"]: estimate(
            graph, f"2x{row['AcceleratorCount']}:{row['Machine']}"
        ).duration_s(samples=1e9)
        for row in rows
    }
    fastest = min(TYPES, key=lambda name: time_s[name])
    cheapest = min(TYPES, key=lambda name: time_s[name] * usd[name])
    assert fastest != cheapest, "otherwise one target would tell nothing of the other"
    assert json.loads(done.stdout.splitlines()[-1]) == {"TIME": fastest, "COST": cheapest}
