"""Load the service on loopback: single estimates, their CPU time and latency, rows of tables.

Needs the extra [serve] and wrk. Service and load share the machine's cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import estimator as est

TOKEN = "a-secret-of-the-benchmark"
PORT = 8329
COUNTS = [f"{nodes}x{each}:h100-sxm" for nodes in range(1, 101) for each in range(1, 9)]


def main() -> None:
    """Start the service, load it, print figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--graph", type=Path, required=True, help="As 'estimator trace' wrote it.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {"ESTIMATOR_TOKEN": TOKEN, "ESTIMATOR_HOME": home}
        words = ["serve", "--port", str(PORT), "--workers", str(asked.workers)]
        command = [sys.executable, "-m", "estimator.cli.main", *words]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            wait_for_health()
            graph = json.loads(ask("POST", "/graphs", asked.graph.read_bytes()))["graph"]
            measure(graph, process.pid, asked.seconds, Path(home))
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def measure(graph: str, group: int, seconds: int, home: Path) -> None:
    """Print what the service does in some seconds of each load."""
    rate = 0.0
    for reasons in (False, True):
        asked = [{"graph": graph, "on": on, "reasons": reasons} for on in COUNTS[:64]]
        for question in asked * 6:  # every worker becomes warm
            ask("POST", "/estimate", question)
        before_s = cpu_s(group)
        text = wrk(asked, seconds, home, connections=32)
        rate = found(r"Requests/sec:\s+([\d.]+)", text)
        each_ms = 1e3 * (cpu_s(group) - before_s) / max(1.0, rate * seconds)
        told = "with" if reasons else "without"
        print(f"single estimates {told} reasons: {rate:.0f}/s, {each_ms:.2f} ms of CPU each")
    question = asked[-1]
    for what, load in (("half load", None), ("half load during refits", train)):
        stop = threading.Event()
        thread = threading.Thread(target=load or stop.wait, args=(graph, stop) if load else ())
        thread.start()
        times_ms = paced(question, rate / 2, seconds)
        stop.set()
        thread.join()
        p50, p99 = times_ms[len(times_ms) // 2], times_ms[int(0.99 * len(times_ms))]
        print(f"{what}, {rate / 2:.0f}/s: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    rows = (COUNTS * 125)[:100_000]
    content = json.dumps({"graph": graph, "on": rows}).encode()
    for lines in (1, 2):
        rate = len(rows) * tables_per_s(content, lines, seconds)
        print(f"tables of {len(rows)} texts, four columns, {lines} at once: {rate:.0f} rows/s")


def tables_per_s(content: bytes, lines: int, seconds: int) -> float:
    """Tables that some connections get a second, each asking for one after another."""
    for _ in range(6):  # every worker becomes warm
        ask("POST", "/estimate_many", content)
    done, begun_s = list[float](), time.perf_counter()

    def run() -> None:
        while time.perf_counter() - begun_s < seconds:
            ask("POST", "/estimate_many", content)
            done.append(time.perf_counter() - begun_s)

    threads = [threading.Thread(target=run) for _ in range(lines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(done) / max(done)


def wrk(questions: list[Any], seconds: int, home: Path, *, connections: int) -> str:
    """What wrk prints of questions in turn without pauses."""
    bodies = ",".join(f"[[{json.dumps(question)}]]" for question in questions)
    script = home / "load.lua"
    script.write_text(
        f"local bodies, number = {{{bodies}}}, 0\n"
        'wrk.headers["Content-Type"] = "application/json"\n'
        f'wrk.headers["Authorization"] = "Bearer {TOKEN}"\n'
        "request = function()\n"
        "  number = number % #bodies + 1\n"
        '  return wrk.format("POST", nil, nil, bodies[number])\n'
        "end\n"
    )
    words = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script)]
    address = f"http://127.0.0.1:{PORT}/estimate"
    return subprocess.run([*words, address], capture_output=True, text=True, check=True).stdout


def paced(question: Any, rate: float, seconds: int) -> list[float]:
    """Milliseconds of requests sent at a fixed rate over 32 connections in turn, sorted.

    Each counts from when it was due, whether or not a connection was free then.
    """
    content = json.dumps(question).encode()
    fields = {"Host": "127.0.0.1", "Content-Length": str(len(content))} | headers()
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    request = f"POST /estimate HTTP/1.1\r\n{lines}\r\n".encode() + content
    free = deque(socket.create_connection(("127.0.0.1", PORT)) for _ in range(32))
    due_s = dict.fromkeys(free, 0.0)
    pending = dict.fromkeys(free, b"")
    poll = select.epoll()
    by_number = {line.fileno(): line for line in free}
    for number in by_number:
        poll.register(number, select.EPOLLIN)
    times_ms, sent, begun_s = list[float](), 0, time.perf_counter()
    while len(times_ms) < int(rate * seconds):
        next_s = begun_s + sent / rate
        is_over = sent >= int(rate * seconds)
        if free and not is_over and next_s <= time.perf_counter():
            line = free.popleft()
            due_s[line], sent = next_s, sent + 1
            line.sendall(request)
            continue
        wait_s = max(0.0, next_s - time.perf_counter()) if free and not is_over else 10.0
        for number, _ in poll.poll(wait_s):
            line = by_number[number]
            pending[line] += line.recv(1 << 16)
            if is_whole(pending[line]):
                times_ms.append(1e3 * (time.perf_counter() - due_s[line]))
                pending[line] = b""
                free.append(line)
    for line in free:
        line.close()
    return sorted(times_ms)


def is_whole(text: bytes) -> bool:
    """Whether a response has come to its end; anything but an answer ends the run."""
    head, found, body = text.partition(b"\r\n\r\n")
    if found and not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(text.decode())
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(found and length and len(body) >= int(length[1]))


def train(graph: str, stop: threading.Event) -> None:
    """Observe steps, so that workers refit all the time."""
    while not stop.wait(0.2):
        seen = {"graph": graph, "on": "1x8:h100-sxm", "step_time_s": 0.2, "batch_per_gpu": 8}
        ask("POST", "/observe", seen)


def headers() -> dict[str, str]:
    """Of every request."""
    return {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}


def ask(method: str, path: str, body: Any = None) -> bytes:
    """The body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, body=content, headers=headers())
    response = connection.getresponse()
    text = response.read()
    if response.status >= 400:
        raise SystemExit(f"{path}: {text.decode()}")
    return text


def wait_for_health() -> None:
    """Wait until a worker answers."""
    for _ in range(600):
        try:
            ask("GET", "/health")
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the service does not answer")


def cpu_s(group: int) -> float:
    """CPU seconds of all processes of a group so far (Linux)."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def found(pattern: str, text: str) -> float:
    """A figure in a text."""
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(text)
    return float(match[1])


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    print(f"throughput-estimator {est.__version__}, {os.cpu_count()} cores")
    main()
