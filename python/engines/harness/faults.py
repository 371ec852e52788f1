"""Faults of a storage node that penstock.testing.Node has no method for."""

from __future__ import annotations

from pathlib import Path

from penstock.testing import Node

_PAGE = 4096


def damage(node: Node) -> int:
    """Flip a bit in each page that the node has written to its segments, and return how many pages these are.

    The node must not run: what it has in memory would go on to be right.
    """
    if node.running:
        raise ValueError("the node runs; kill or stop it first")
    flipped = 0
    for file in sorted(node.data.rglob("segment-*")):
        flipped += _damage_file(file)
    if not flipped:
        raise ValueError(f"no segment in {node.data} has anything in it")
    return flipped


def _damage_file(file: Path) -> int:
    flipped = 0
    with file.open("r+b") as f:
        f.seek(_PAGE)  # the segment's header stays, so that the node opens the segment
        while page := f.read(_PAGE):
            if not any(page):
                continue
            start = f.tell() - len(page)
            middle = len(page) // 2
            f.seek(start + middle)
            f.write(bytes([page[middle] ^ 1]))
            f.seek(start + len(page))
            flipped += 1
    return flipped
