"""``penstock bench engines`` with the stores that need no other package: Penstock's client of this wheel, and a file per block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from penstock._program import program

STORES = "^(penstock|file per block)$"


def test_engines(tmp_path: Path) -> None:
    """The worker verifies every byte of a get, so a comparison in which no store is missing tests both stores."""
    command = [
        str(program()), "bench", "engines", "--python", sys.executable, "--contenders", STORES, "--data", str(tmp_path),
        "--only", "^(get 1 MiB from memory, 1 thread, single|put 4 MiB, 4 threads, batches of 8)$", "--rounds", "1",
        "--seconds", "0.05", "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "not_run" not in report
    for result in report["results"]:
        assert "not_run" not in result
        assert sorted(a["contender"] for a in result["absolute"]) == ["file per block", "penstock"]
        assert [m["name"] for m in result["measures"]] == ["bandwidth / file per block", "CPU / file per block"]
    assert len(report["results"]) == 2
    assert list(tmp_path.iterdir()) == []
