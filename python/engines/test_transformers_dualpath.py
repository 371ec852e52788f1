"""dualpath_device.py with torch on the CPU. make test-gpu runs it on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("dualpath_device.py")


def test_dualpath_on_torch_tensors() -> None:
    """Prefill and decode processes have the right bytes, also after the prefill process was killed; both sides read from storage."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    block, layers = figures["block_bytes"], figures["layers"]
    for phase in ("computed", "cached", "cached_again"):
        f = figures[phase]
        assert f["decode_bytes"] % block == 0
        assert f["decode_bytes"] >= f["requests"] * 12 * block
        assert f["decode_GiB_per_second"] == f["decode_bytes"] / 2**30 / f["seconds"] > 0
    assert figures["computed"]["read_by_prefill_bytes"] == figures["computed"]["read_by_decode_bytes"] == 0
    for phase in ("cached", "cached_again"):
        assert figures[phase]["read_by_prefill_bytes"] + figures[phase]["read_by_decode_bytes"] >= figures[phase]["requests"] * 12 * block
    killed = figures["killed"]
    assert killed["plans"] > 1
    assert 0 < killed["hit_tokens"] < killed["prompt_tokens"]
    for engine in ("p0", "d0"):
        assert figures[engine]["wrong_rows"] == 0
        assert figures[engine]["compared_rows"] > 0
        assert figures[engine]["compared_rows"] % layers == 0
        assert figures[engine]["sent_bytes"] + figures[engine]["received_bytes"] > 0
