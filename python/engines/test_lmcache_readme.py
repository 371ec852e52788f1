"""The README's commands for LMCache, under vLLM: engine, LMCache's server, Penstock's adapter, node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import readme
from harness.lmcache import CHUNK, LMCache, wait_until_stored
from harness.sessions import Session
from harness.vllm import Vllm


def test_readme(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """A second engine and a second server of LMCache have nothing but the node. The tokens are the same."""
    prompt = max((turn.prompt for turn in agents[0].turns), key=len)
    pip, serve, _ = readme.commands("lmcache server")
    readme.install(pip, tmp_path)
    with readme.node(serve, tmp_path) as address:
        answers: list[dict[str, Any]] = []
        for name in ("first", "second"):
            with LMCache(address, tmp_path / f"{name}.log") as server:
                vllm.start(name, server.connector)
                answers += vllm.generate(name, [prompt])
                wait_until_stored(address, len(prompt) // CHUNK)
                vllm.stop(name)
        first, second = answers
        assert second["tokens"] == first["tokens"]
        assert (first["cached"], second["cached"]) == (0, (len(prompt) - 1) // CHUNK * CHUNK)
