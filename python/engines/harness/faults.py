"""Faults of a storage node that penstock.testing.Node has no method for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from penstock._program import program
from penstock.testing import Node

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
