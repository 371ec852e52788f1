"""A prefill/decode cluster whose long prompts are prefilled in another datacenter, by vLLM with PenstockConnector.

    clients ── gateway ─── p0, d0 of two ranks ─── n0      here
                  ║
           the link, LINK bits per second
                  ║
                  ╚═ node "far" ─── engine of two ranks    elsewhere

The engine elsewhere is a stock vLLM with PenstockConnector, whose namespaces are those of PenstockDualPath.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from dualpath_cluster import PATIENCE, TOKEN_BYTES, Cluster, check, cluster, send, until
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, Vllm, tokens_of

LINK = 40_000_000
BUDGET = LINK // 16
"""What the gateway may send over the link, in bytes per second: half of the link's rate."""
THRESHOLD = 256
"""The gateway has prompts with more tokens prefilled elsewhere."""


def cached(prompt: list[int]) -> int:
    """Return how many tokens of a prompt are not computed if storage has all of it: full blocks, without the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


def outcomes(c: Cluster) -> dict[str, float]:
    """Return where prompts were prefilled, as counts without zeros."""
    kinds = ("local", "busy", "remote", "fetched", "failed")
    found = {kind: c.metric(c.gateway, "penstock_offload_requests_total", f'outcome="{kind}"') for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def test_offload(alone: Vllm, agents: list[Session], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The KV of both ranks crosses the link. Then the engine elsewhere ends, and at last the link fails in the middle of copies.

    All requests get the tokens of one engine alone.
    """
    longest = [max((turn.prompt for turn in session.turns), key=len) for session in agents]
    long = [prompt for prompt in longest if len(prompt) > THRESHOLD]
    groups = [long[:8], long[8:12], long[12:16], [prompt[:THRESHOLD] for prompt in long[16:20]]]
    assert list(map(len, groups)) == [8, 4, 4, 4]
    wanted = [tokens_of(alone.generate("plain", prompts, OUTPUT)) for prompts in groups]

    with cluster(alone, tmp_path, ["p0", "d0"], wide=["d0"]) as c:
        far = c.elsewhere(alone, "far", LINK, 2)

        def front(timeout: int) -> None:
            c.front(*f"""
                --offload-url http://{far.engine.address} --offload-servers {far.node.address} --offload-threshold {THRESHOLD}
                --offload-link-rate {BUDGET} --offload-backlog {PATIENCE}s --offload-timeout {timeout}s
            """.split())  # fmt: skip

        def serve(group: int) -> None:
            assert check(c.serve(groups[group]), wanted[group]) == {"right": len(groups[group])}

        front(PATIENCE // 2)
        serve(3)
        assert outcomes(c) == {"local": 4}
        before = c.metric(c.gateway, "penstock_gateway_hit_tokens_total")
        serve(0)
        assert outcomes(c) == {"local": 4, "remote": 8}
        tokens = sum(map(cached, groups[0]))
        assert c.metric(c.gateway, "penstock_gateway_hit_tokens_total") - before == tokens
        assert c.metric(c.gateway, "penstock_offload_copied_bytes_total") == tokens * TOKEN_BYTES
        for events in ("load_failures", "failed_blocks", "dropped_blocks"):
            assert {name: engine.event(events) for name, engine in c.engines.items()} == {"p0": 0, "d0": 0}, events
        with capsys.disabled():
            print(f"\n8 prompts were prefilled elsewhere: {tokens * TOKEN_BYTES} bytes of KV over the link")

        for prompt, answer in zip(groups[2], wanted[2], strict=True):  # so that storage elsewhere has these prompts
            assert send(c.control, far.engine.address, prompt, OUTPUT, None).tokens == answer
        blocks = 2 * sum(len(prompt) // BLOCK for prompt in groups[0] + groups[2])
        until(lambda: c.metric(far.node, "penstock_store_blocks") >= blocks, "blocks elsewhere")

        far.engine.kill()
        serve(1)
        found = outcomes(c)
        assert found["remote"] == 8
        assert found["failed"] >= 1
        assert found["failed"] + found.get("busy", 0) == 4

        front(10)
        far.link.limit(LINK // 40)
        batch = c.begin(groups[2])
        until(lambda: c.metric(c.gateway, "penstock_offload_waiting_bytes") > 0, "copies")
        far.link.unplug()
        assert check(batch.answers(), wanted[2]) == {"right": 4}
        assert outcomes(c) == {"failed": 4}
