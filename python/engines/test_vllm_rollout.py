"""examples/rl_rollout.py, as a user runs it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import testing

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/rl_rollout.py"
BLOCK = 32


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(EXAMPLE), *arguments], capture_output=True, text=True, timeout=1200)


def test_policies(kept: testing.Node, tmp_path: Path) -> None:
    """Tokens of strict and pinned are those of an engine alone with the same weights. Each policy reuses the KV that it allows."""
    picture = tmp_path / "rollout.svg"
    shape = ["--groups", "3", "--group-size", "1", "--active", "2", "--turns", "5", "--update", "2"]
    done = run("--servers", kept.address, "--check", "--format", "json", "--plot", str(picture), *shape)
    assert done.returncode == 0, done.stderr
    strict, bounded, pinned = json.loads(done.stdout)
    for r in (strict, bounded, pinned):
        assert r["turns"] == 3 * 5
        assert r["updates"] >= 2
        assert r["cached_tokens"] == sum(o["cached_tokens"] for o in r["each_round"]) > 0
        assert r["most_bytes"] > 0
    assert [r["checked_turns"] for r in (strict, bounded, pinned)] == [15, 0, 15]
    assert strict["differing_turns"] == pinned["differing_turns"] == 0

    assert strict["older_hits"] == pinned["older_hits"] == 0 < bounded["older_hits"]
    # What an agent had before an update is computed again, and no more than a part of a block otherwise.
    for before, after in itertools.pairwise(strict["each_round"]):
        again = after["recomputed_tokens"]
        assert again > 256 if before["version"] != after["version"] else again < BLOCK * after["turns"]
    assert pinned["recomputed_tokens"] < BLOCK * pinned["turns"]
    assert pinned["recomputed_tokens"] <= bounded["recomputed_tokens"] < strict["recomputed_tokens"]
    # Under pinned two versions are in use at once.
    assert max(len(o["bytes_by_version"]) for o in pinned["each_round"]) == 2
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--servers", "127.0.0.1:1"], "127.0.0.1:1"),
        (["--policies", "strict,hope"], "unknown policy 'hope'"),
        (["--update", "0"], "--update 0: want at least 1"),
    ],
)
def test_bad_input(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(("rl_rollout: ", "rl_rollout.py: error: "))
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
