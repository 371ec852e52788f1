"""Faults of a storage node that penstock.testing.Node has no method for."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock import testing
from penstock._program import program
from penstock.testing import Node

_Result = TypeVar("_Result")

_PAGE = 4096
_SEGMENT = re.compile(r"segment (\d+) of volume \w+: \d+ slots of (\d+) bytes")
_SLOT = re.compile(r"  (\d+): generation \d+ namespace (\d+) .* depth (\d+),")


def damage(node: Node, namespace: int = 0, depth: int = 0) -> int:
    """Flip a bit in each page that the node has written to its segments, and return how many pages these are.

    With the number of a namespace, only its blocks are damaged that have at least depth blocks in front of them. The node
    must not run, because its memory would still hold the right blocks.
    """
    if node.running:
        raise ValueError("the node runs; kill or stop it first")
    flipped = 0
    for file in sorted(node.data.rglob("segment-*")):
        # The segment's header stays, so that the node opens the segment.
        places = _slots(node, file, namespace, depth) if namespace else [(_PAGE, file.stat().st_size)]
        flipped += sum(_damage_pages(file, first, end) for first, end in places)
    if not flipped:
        raise ValueError(f"no segment in {node.data} has anything in it")
    return flipped


def while_stopped(node: Node, run: Callable[[], _Result], seconds: float = 30) -> list[_Result]:
    """Stop a node, if it is not stopped yet, and let an engine run again and again until the node was stopped for that long.

    Return what the runs return, at least one. Each of them has ended while the node was stopped. The node continues then.
    """
    node.pause()
    end = time.monotonic() + seconds
    results = [run()]
    while time.monotonic() < end:
        results.append(run())
    assert testing._stopped(node.pid), "the node has run meanwhile"
    node.resume()
    return results


def until(run: Callable[[], Mapping[str, float]], event: str) -> None:
    """Let an engine run until an event happens: engines leave nodes alone for a while that did not answer in time."""
    for _ in range(100):
        if run()[event] > 0:
            return
    raise TimeoutError(f"no {event} in 100 runs")


def namespaces(node: Node) -> dict[str, int]:
    """Return the number of each namespace of a node that runs."""
    listed = penstock("ns", "list", "--server", node.address)["namespaces"]
    return {one["name"]: one["id"] for one in listed}


def blocks(node: Node) -> int:
    """Return how many blocks the node has."""
    return sum(int(one["blocks"]) for one in penstock("ns", "list", "--server", node.address)["namespaces"])


def _slots(node: Node, file: Path, namespace: int, depth: int) -> list[tuple[int, int]]:
    """Return the first byte of each slot of a namespace from a depth on, and the first byte behind the slot."""
    number = file.name.removeprefix("segment-")
    lines = penstock("store", "inspect", "--data", str(node.data), "--segment", str(int(number)))["lines"]
    head = _SEGMENT.match(lines[0])
    assert head is not None, lines[0]
    size = int(head[2])
    found = [[int(part) for part in slot.groups()] for slot in map(_SLOT.match, lines[1:]) if slot is not None]
    slots = [slot for slot, its, deep in found if its == namespace and deep >= depth]
    return [(_PAGE + slot * size, _PAGE + (slot + 1) * size) for slot in slots]


def penstock(*arguments: str, timeout: float = 60) -> Any:
    """Return what a command of the program prints with ``--format json``."""
    done = subprocess.run([program(), *arguments, "--format", "json"], check=True, capture_output=True, text=True, timeout=timeout)
    return json.loads(done.stdout)


def _damage_pages(file: Path, first: int, end: int) -> int:
    flipped = 0
    with file.open("r+b") as f:
        for start in range(first, end, _PAGE):
            f.seek(start)
            page = f.read(_PAGE)
            if not any(page):
                continue
            middle = start + len(page) // 2
            f.seek(middle)
            f.write(bytes([page[len(page) // 2] ^ 1]))
            flipped += 1
    return flipped


class _OtherVersion(socketserver.BaseRequestHandler):
    """A proxy of a node's data plane. With the proxy the node looks like one whose protocol has the next version.

    The fourth byte in each direction is the version. The node sends the next version. For a node of the next version the
    client is one version behind.
    """

    plane: tuple[str, int]

    def handle(self) -> None:
        with contextlib.suppress(OSError, IndexError), socket.create_connection(self.plane) as node:  # a client may end early
            hello = bytearray(self.request.recv(88, socket.MSG_WAITALL))
            hello[3] -= 1
            node.sendall(hello)
            challenge = bytearray(node.recv(56, socket.MSG_WAITALL))
            challenge[3] += 1
            self.request.sendall(challenge)
            self.request.recv(1)  # until the client closes the connection


@contextlib.contextmanager
def node_of_another_version() -> Iterator[Node]:
    """Run a node that looks to clients as if it were of the next release."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OtherVersion) as proxy:
        _OtherVersion.plane = ("127.0.0.2", proxy.server_address[1])
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            listen = ["--data-listen", "{}:{}".format(*_OtherVersion.plane), "--advertise", "127.0.0.1"]
            with testing.node(args=listen) as node:
                yield node
        finally:
            proxy.shutdown()
            thread.join()
