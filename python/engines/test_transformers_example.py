"""examples/transformers_agent.py, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock import testing

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/transformers_agent.py"
BLOCK = 32


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=600)


def agent(node: testing.Node, *arguments: str) -> list[dict[str, Any]]:
    done = run("--servers", node.address, "--check", "--format", "json", *arguments)
    assert done.returncode == 0, done.stderr
    turns: list[dict[str, Any]] = json.loads(done.stdout)
    for turn in turns:
        # The KV is the same to the bit. Sums over prompts that were computed in other parts round in another way.
        assert turn["logits_difference"] <= 1e-4 * turn["logits_scale"]
    return turns


def blocks(tokens: int) -> int:
    """The tokens of the whole blocks."""
    return tokens // BLOCK * BLOCK


def test_conversation_continues_in_another_process(node: testing.Node) -> None:
    first = agent(node)
    assert [t["prompt"] for t in first] == [200, 416, 632, 848]
    # A turn finds what the turn before had computed: its prompt and its answer but for the last token.
    assert [t["loaded"] for t in first] == [0, *(blocks(t["prompt"] + 15) for t in first[:-1])]

    second = agent(node)
    assert [t["answer"] for t in second] == [t["answer"] for t in first]
    # The model needs the last token of the prompt.
    assert [t["loaded"] for t in second] == [blocks(t["prompt"] - 1) for t in first]

    # Other weights have other KV, and a namespace of their own.
    assert agent(node, "--seed", "1", "--turns", "1")[0]["loaded"] == 0


def test_no_node() -> None:
    done = run("--servers", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("transformers_agent: ")
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
