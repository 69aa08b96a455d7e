"""Drive a real browser through its debugging port; a test without one skips."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest


def addresses(port: int) -> list[str]:
    """Where each page of a browser is driven."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            pages = json.load(answer)
    except OSError:
        return []
    return [each["webSocketDebuggerUrl"] for each in pages if each["type"] == "page"]


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Page:
    """A page of a browser, driven through its debugging port."""

    def __init__(self, connection: Any, width: int) -> None:
        self._connection = connection
        self._events = list[Any]()
        for domain in ("Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        # A window is never as narrow as a telephone.
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def _call(self, method: str, **params: Any) -> Any:
        self._connection.send(json.dumps({"id": 1, "method": method, "params": params}))
        while "id" not in (message := json.loads(self._connection.recv(30))):
            self._events.append(message)
        return message["result"]

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self._call("Runtime.evaluate", expression=code)["result"].get("value")

    def beyond_width(self) -> int:
        """Pixels by which the page scrolls sideways."""
        root = "document.documentElement"
        found: int = self.run(f"{root}.scrollWidth - {root}.clientWidth")
        return found

    def errors(self) -> list[Any]:
        """What the console was told, and what was raised."""
        logged = [each["entry"] for each in self.happened("Log.entryAdded")]
        raised = self.happened("Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return raised + [each["text"] for each in logged if each["level"] == "error"]

    def requested(self) -> set[str]:
        """The addresses of all that was asked for."""
        asked = self.happened("Network.requestWillBeSent")
        return {each["request"]["url"] for each in asked}

    def happened(self, *methods: str) -> list[Any]:
        """What the browser told of by some of its events."""
        return [each["params"] for each in self._events if each["method"] in methods]

    def wait_for(self, code: str) -> None:
        """Wait until an expression is true, also over a change of pages."""
        until(lambda: self.run(code) is True)


@contextmanager
def browser_page(folder: Path, *, width: int) -> Iterator[Page]:
    """An empty page of a real browser."""
    client = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("there is no Chromium here to open the page with")
    words = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    command = [found, *words, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        announced = folder / "DevToolsActivePort"
        until(lambda: announced.exists() and announced.read_text() != "")
        port = int(announced.read_text().split()[0])
        until(lambda: addresses(port) != [])
        address = addresses(port)[0]
        with client.connect(address, max_size=None) as connection:
            yield Page(connection, width)
    finally:
        process.kill()
        process.wait()
