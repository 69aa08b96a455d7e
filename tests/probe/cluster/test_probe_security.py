"""Who reaches the store of a probe without its secret runs nothing, forges nothing, joins nothing.

The attacker of these tests knows everything but the secret: the keys, the form of the messages and
what the ranks have posted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as torch_distributed

from estimator.machines.catalogue import load_profile
from estimator.machines.profile import MachineProfile
from estimator.probe.cluster.discovery import VARIABLE
from estimator.probe.cluster.signed_store import signed
from tests.conftest import free_port

dist: Any = torch_distributed
# What only an attacker says: no link takes so long.
ABSURD_S = 98765.0
# The steps of two ranks exchange some ten values.
VALUES = 12
PAYLOAD = """
import os, pathlib

def run(*_):
    pathlib.Path(os.environ["PAYLOAD_RAN"]).touch()
"""
SECRET = "0123456789abcdef" * 2
# What names a module of the attacker's, in case any such name is ever called.
FORGED_ORDER = {
    "refused": {"1": "go away"},
    "nonces": {},
    "machines": {"1": {"name": "payload:run"}},
    "members": [{"rank": 0}, {"rank": 1}],
    "function": "payload:run",
    "step": "payload:run",
    "measure": "payload:run",
}
ABSURD_REPORT = [{"op": "all_reduce", "windows": [[1 << 20, 0.0, ABSURD_S]] * 4}]


class Attacker:
    """Another process' view of the store: everything can be read and written."""

    def __init__(self, port: int) -> None:
        server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self.store = dist.PrefixStore("estimator/0", server)
        self.forged: dict[str, bytes] = {}
        self.replayed: set[str] = set()

    def forge(self) -> None:
        """Post orders, measurements and ends to come, signed with a guess."""
        self._post("order", FORGED_ORDER)
        self._post("over", True)
        for rank in range(2):
            self._post(f"ended/{rank}", "")
        for count in range(1, VALUES):
            self._post(f"step/{count}", 0.0)
            for rank in range(2):
                self._post(f"step/{count}/{rank}", ABSURD_REPORT)

    def _post(self, key: str, value: Any) -> None:
        body = json.dumps(value).encode()
        # Half of them without any signature.
        forged = signed(b"guessed", key, body) if len(self.forged) % 2 else body
        self.forged[key] = forged
        self.store.set(key, forged)

    def replay(self) -> None:
        """Copy what the ranks say to where they say the next, as long as nothing else is there."""
        for number in range(1, VALUES - 1):
            for end in ("", "/0", "/1"):
                self._replay(f"step/{number}{end}", f"step/{number + 1}{end}")
        self._replay("order", "over")
        self._replay("ended/1", "ended/0")

    def _replay(self, key: str, later: str) -> None:
        there = self.store.get(key)
        if there != self.forged[key] and later not in self.replayed:
            # In one step: what a rank has posted meanwhile stays.
            self.store.compare_set(later, self.forged[later], there)
            self.replayed.add(later)


@dataclass(frozen=True)
class Attacked:
    """What came of a probe under attack."""

    codes: list[int]
    said: list[str]
    profile: MachineProfile
    attacker: Attacker
    payload_ran: bool
    stranger: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    """Two ranks are probed; another process says that it is rank 1."""
    from tests.conftest import make_small_profile

    folder = tmp_path_factory.mktemp("attacked")
    (folder / "payload.py").write_text(PAYLOAD)
    make_small_profile("base").save(folder / "base.json")
    port = free_port()
    files = ["--base", str(folder / "base.json"), "--out", str(folder / "out.json")]
    options = ["--budget", "24", *files]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]),
        "PAYLOAD_RAN": str(folder / "ran"),
        VARIABLE: SECRET,
    }

    def start(rank: int, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "estimator.probe", *options],
            env={**environment, "RANK": str(rank), **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    # Rank 1 comes once everything is forged.
    with ExitStack() as stack:
        first = stack.enter_context(start(0))
        attacker = Attacker(port)
        attacker.forge()
        second, stranger = start(1), start(1, **{VARIABLE: "f" * 32})
        processes = [first, second, stranger]
        for process in processes:
            stack.callback(process.kill)
        ended = threading.Event()
        replaying = threading.Thread(target=_replay_until, args=(attacker, ended))
        replaying.start()
        stack.callback(replaying.join)
        stack.callback(ended.set)
        outputs = [process.communicate(timeout=120) for process in processes]
    done = [
        subprocess.CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(processes, outputs, strict=True)
    ]
    assert [each.returncode for each in done[:2]] == [0, 0], [each.stderr for each in done]
    return Attacked(
        codes=[each.returncode for each in done[:2]],
        said=[each.stderr for each in done[:2]],
        profile=load_profile(folder / "out.json"),
        attacker=attacker,
        payload_ran=(folder / "ran").exists(),
        stranger=done[2],
    )


def _replay_until(attacker: Attacker, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            attacker.replay()
        except RuntimeError:
            # The store ends with the probe.
            return
        time.sleep(0.01)


def check_that_real_steps_ran(attacked: Attacked) -> None:
    """Whatever the attacker wrote, the two ranks measured and ended in peace."""
    assert attacked.codes == [0, 0], attacked.said
    first = next(cost for cost in attacked.profile.collectives if cost.hosts)
    assert (first.op, first.group_size) == ("all_reduce", 2)


def test_an_order_that_names_a_module_runs_nothing(attacked: Attacked) -> None:
    assert not attacked.payload_ran
    check_that_real_steps_ran(attacked)


def test_forged_measurements_and_ends_are_ignored_and_said(attacked: Attacked) -> None:
    assert str(ABSURD_S) not in json.dumps(attacked.profile.to_dict())
    for cost in attacked.profile.collectives:
        assert all(seconds < ABSURD_S / 100 for _, seconds in cost.points)
    assert "were not signed with the secret of this launch and were ignored" in attacked.said[0]


def test_replayed_messages_are_ignored(attacked: Attacked) -> None:
    kinds = {key.split("/")[0] for key in attacked.attacker.replayed}
    assert {"over", "step"} <= kinds
    # A message of before that is taken for the next one leaves that unmeasured.
    check_that_real_steps_ran(attacked)
    # Two would be found where a step ran twice or a report counted twice.
    hosts = [(cost.op, cost.hosts) for cost in attacked.profile.collectives if cost.hosts]
    assert len(hosts) == len(set(hosts))


def test_a_third_process_without_the_secret_cannot_join(attacked: Attacked) -> None:
    assert attacked.stranger.returncode == 2
    (line,) = attacked.stranger.stderr.splitlines()
    assert "has another secret than rank 1; give all ranks" in line
