"""Read the switches and nodes that Slurm knows: ``topology.conf`` and ``topology.yaml``.

Link speeds there are in arbitrary units that Slurm itself does not use (topology.conf(5)), so the
cluster has no rates; they can be added to its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from estimator.errors import ImportedFileError, TopologyError, printable, quoted
from estimator.placement.topology import MOST_NODES, Cluster, Node, Switch, expand_hosts
from estimator.probe.imports.findings import Imported

CONF_FORMAT, YAML_FORMAT = "Slurm topology.conf", "Slurm topology.yaml"
CONF_LINE = re.compile(r"^[^\S\n]*(SwitchName|BlockName|RingName)\s*=\s*\S+", re.M | re.I)
YAML_LINE = re.compile(r"^[^\S\n]*-\s+topology:\s*\S+", re.M)
_YES = ("true", "yes", "on", "y")
# A list of topologies, each with a tree, its switches, their entries.
_MOST_LEVELS = 16
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
                f"line {number} of the topology names no switch ({quoted(content)}); write "
                "SwitchName=s0 Nodes=n[0-5]"
            )
        if "nodes" not in values and "switches" not in values:
            raise ImportedFileError(
                f"line {number} of the topology is cut off: {quoted(name)} has neither Nodes nor "
                "Switches; give the whole file"
            )
        entries.append(_entry(name, values.get("nodes"), values.get("switches")))
    return Imported(formats=(CONF_FORMAT,), cluster=_cluster(entries, machine))


def read_topology_yaml(text: str, *, machine: str) -> Imported:
    """The cluster of the default topology in a ``topology.yaml``, or else of the first."""
    chosen = _chosen(_yaml(text))
    if isinstance(chosen.get("tree"), Mapping):
        listed, key = chosen["tree"].get("switches"), "switch"
    elif isinstance(chosen.get("block"), Mapping):
        listed, key = chosen["block"].get("blocks"), "block"
    else:
        raise ImportedFileError(
            f"the topology {quoted(chosen.get('topology'))} has neither a tree nor "
            f"blocks, so it says "
            "nothing of switches; write a cluster file by hand"
        )
    entries = list(_listed(listed, key))
    return Imported(formats=(YAML_FORMAT,), cluster=_cluster(entries, machine))


def _yaml(text: str) -> Any:
    """The values of a YAML text, all of them as text; raises ImportedFileError."""
    import yaml

    # libyaml's, where it is there: the one in Python takes seconds for what a cluster has.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.AliasEvent):
                raise ImportedFileError(
                    "the topology has aliases, which may stand for any amount; write each entry out"
                )
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_LEVELS:
                raise ImportedFileError("the topology is nested too deeply; give the whole file")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ImportedFileError):
            raise
        reason = printable(" ".join(str(error).split()))
        raise ImportedFileError(
            f"the topology is not YAML ({reason}); give the whole file"
        ) from None


def _chosen(content: Any) -> Mapping[str, Any]:
    listed = content if isinstance(content, list) else []
    topologies = [entry for entry in listed if isinstance(entry, Mapping)]
    if not topologies:
        raise ImportedFileError("the YAML lists no topology; give the whole topology.yaml")
    defaults = [entry for entry in topologies if str(entry.get("cluster_default")).lower() in _YES]
    return (defaults or topologies)[0]


def _listed(listed: Any, key: str) -> Iterator[_Entry]:
    if not isinstance(listed, list):
        raise ImportedFileError(
            f"the topology has no list of {key} entries; give the whole topology.yaml"
        )
    for entry in listed:
        if not isinstance(entry, Mapping) or not isinstance(entry.get(key), str):
            raise ImportedFileError(
                f"an entry of the topology has no '{key}'; give the whole topology.yaml"
            )
        yield _entry(entry[key], entry.get("nodes"), entry.get("children"))


def _entry(name: str, nodes: Any, switches: Any) -> _Entry:
    return _Entry(name, tuple(_hosts(nodes)), tuple(_hosts(switches)))


def _hosts(listed: Any) -> Iterator[str]:
    """Names of a host list such as ``a[1-3],b7``."""
    if not isinstance(listed, str | None):
        raise ImportedFileError(
            f"a host list must be text such as a[1-3], found {quoted(listed)}; give the whole file"
        )
    count = 0
    try:
        for pattern in filter(None, _BETWEEN_HOSTS.split(listed or "")):
            for name in expand_hosts(pattern):
                count += 1
                if count > MOST_NODES:
                    raise TopologyError(f"there are more than {MOST_NODES} nodes")
                yield name
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
                        f"{quoted(name)} hangs on both {quoted(above[name])} and "
                        f"{quoted(entry.name)}, and only "
                        "trees of switches are supported; write a cluster file by hand"
                    )
                above[name] = entry.name
    known = {entry.name for entry in entries}
    lacking = sorted(set(parents) - known)
    if lacking:
        raise ImportedFileError(
            f"the topology is cut off: switch {quoted(lacking[0])} is used and not "
            "described; give the whole file"
        )
    try:
        return Cluster(
            nodes={name: Node(machine=machine, switch=switch) for name, switch in plugged.items()},
            switches={entry.name: Switch(parent=parents.get(entry.name)) for entry in entries},
        )
    except TopologyError as error:
        raise ImportedFileError(f"the topology cannot be used: {error}") from None
