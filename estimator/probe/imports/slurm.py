"""Read the switches and nodes that Slurm knows: ``topology.conf`` and ``topology.yaml``.

Link speeds there are in arbitrary units that Slurm itself does not use (topology.conf(5)), so the
cluster has no rates; they can be added to its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estimator.errors import ImportedFileError, TopologyError
from estimator.placement.topology import Cluster, Node, Switch, expand_hosts
from estimator.probe.imports.findings import Imported

CONF_FORMAT, YAML_FORMAT = "Slurm topology.conf", "Slurm topology.yaml"
CONF_LINE = re.compile(r"^\s*(SwitchName|BlockName|RingName)\s*=\s*\S+", re.M | re.I)
YAML_LINE = re.compile(r"^\s*-\s+topology:\s*\S+", re.M)
_ASSIGNMENT = re.compile(r"(\w+)\s*=\s*(\S+)")
_BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One switch or block: the nodes and the switches below it."""

    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


def read_topology_conf(text: str, *, machine: str) -> Imported:
    """The cluster of a ``topology.conf``; every node is of type `machine`."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        values = {key.lower(): value for key, value in _ASSIGNMENT.findall(content)}
        if "ringname" in values:
            raise ImportedFileError(
                f"line {number} describes a ring, and only trees of switches are supported; write "
                "a cluster file by hand"
            )
        name = values.get("switchname", values.get("blockname"))
        if name is None:
            if "blocksizes" in values:
                continue
            raise ImportedFileError(
                f"line {number} of the topology names no switch ('{content}'); write "
                "SwitchName=s0 Nodes=n[0-5]"
            )
        if "nodes" not in values and "switches" not in values:
            raise ImportedFileError(
                f"line {number} of the topology is cut off: '{name}' has neither Nodes nor "
                "Switches; give the whole file"
            )
        entries.append(_entry(name, values.get("nodes"), values.get("switches")))
    return Imported(formats=(CONF_FORMAT,), cluster=_cluster(entries, machine))


def read_topology_yaml(text: str, *, machine: str) -> Imported:
    """The cluster of the default topology in a ``topology.yaml``, or else of the first."""
    import yaml

    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ImportedFileError(
            f"the topology is not YAML ({' '.join(str(error).split())[:120]}); give the whole file"
        ) from None
    chosen = _chosen(content)
    if isinstance(chosen.get("tree"), Mapping):
        listed, key = chosen["tree"].get("switches"), "switch"
    elif isinstance(chosen.get("block"), Mapping):
        listed, key = chosen["block"].get("blocks"), "block"
    else:
        raise ImportedFileError(
            f"the topology '{chosen.get('topology')}' has neither a tree nor blocks, so it says "
            "nothing of switches; write a cluster file by hand"
        )
    entries = list(_listed(listed, key))
    return Imported(formats=(YAML_FORMAT,), cluster=_cluster(entries, machine))


def _chosen(content: Any) -> Mapping[str, Any]:
    topologies = [entry for entry in content or () if isinstance(entry, Mapping)]
    if not topologies:
        raise ImportedFileError("the YAML lists no topology; give the whole topology.yaml")
    defaults = [entry for entry in topologies if entry.get("cluster_default") is True]
    return (defaults or topologies)[0]


def _listed(listed: Any, key: str) -> Iterator[_Entry]:
    if not isinstance(listed, list):
        raise ImportedFileError(
            f"the topology has no list of {key} entries; give the whole topology.yaml"
        )
    for entry in listed:
        if not isinstance(entry, Mapping) or key not in entry:
            raise ImportedFileError(
                f"an entry of the topology has no '{key}'; give the whole topology.yaml"
            )
        yield _entry(str(entry[key]), entry.get("nodes"), entry.get("children"))


def _entry(name: str, nodes: Any, switches: Any) -> _Entry:
    return _Entry(name, tuple(_hosts(nodes)), tuple(_hosts(switches)))


def _hosts(listed: Any) -> Iterator[str]:
    """Names of a host list such as ``a[1-3],b7``."""
    try:
        for pattern in filter(None, _BETWEEN_HOSTS.split(str(listed or ""))):
            yield from expand_hosts(pattern)
    except TopologyError as error:
        raise ImportedFileError(f"the topology cannot be read: {error}") from None


def _cluster(entries: Sequence[_Entry], machine: str) -> Cluster:
    parents: dict[str, str] = {}
    plugged: dict[str, str] = {}
    for entry in entries:
        for child, above in ((entry.switches, parents), (entry.nodes, plugged)):
            for name in child:
                if name in above:
                    raise ImportedFileError(
                        f"'{name}' hangs on both '{above[name]}' and '{entry.name}', and only "
                        "trees of switches are supported; write a cluster file by hand"
                    )
                above[name] = entry.name
    known = {entry.name for entry in entries}
    lacking = sorted(set(parents) - known)
    if lacking:
        raise ImportedFileError(
            f"the topology is cut off: switch '{lacking[0]}' is used and not described; give the "
            "whole file"
        )
    try:
        return Cluster(
            nodes={name: Node(machine=machine, switch=switch) for name, switch in plugged.items()},
            switches={entry.name: Switch(parent=parents.get(entry.name)) for entry in entries},
        )
    except TopologyError as error:
        raise ImportedFileError(f"the topology cannot be used: {error}") from None
