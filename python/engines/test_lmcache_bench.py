"""``lmcache bench l2``, LMCache's own program, over Penstock's adapter: it compares the bytes that it stores and loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock import testing as penstock_testing

KEYS, ROUNDS, WARMUP = 8, 4, 1

SIZES = ["--num-keys", str(KEYS), "--in-flight", "2", "--data-size-kb", "1024", "--l1-align-bytes", "4096"]
SIZES += ["--rounds", str(ROUNDS), "--warmup-rounds", str(WARMUP)]


def bench(node: penstock_testing.Node, hit_rate: float) -> dict[str, Any]:
    """Run the program in a process of its own and return its report, by operation."""
    spec = {
        "type": "native_plugin",
        "module_path": "penstock.lmcache",
        "class_name": "PenstockL2",
        "adapter_params": {"servers": node.address},
    }
    done = subprocess.run(
        [Path(sys.executable).parent / "lmcache", "bench", "l2", "--l2-adapter", json.dumps(spec), *SIZES,
         "--lookup-max-hit-rate", str(hit_rate), "--no-skip-verify", "--format", "json"],
        env={**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert f"All {2 * KEYS} keys data verified OK" in done.stdout, log
    report, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("\n{\n") :].lstrip())
    operations = [section for name, section in report["metrics"].items() if name.startswith("op_")]
    assert all(operation["rounds_timed_out"] == 0 for operation in operations), log
    return {operation["operation"]: operation["total_success"] for operation in operations}


def test_bench(node: penstock_testing.Node) -> None:
    """Store, look up, load and compare; then again in another process, after the node was started again."""
    total = ROUNDS * 2 * KEYS
    assert bench(node, 0.5) == {"Store": total, "Lookup": total // 2, "Load": total}
    node.stop()
    node.start()
    # The second process stores nothing, since all is stored, and so compares with the bytes of the first.
    assert bench(node, 1) == {"Store": total, "Lookup": total, "Load": total}
