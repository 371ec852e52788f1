"""vLLM's own engine on PenstockTier: two engines, one after the other, on one node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.process import Engine
from harness.sessions import Session

from penstock import testing as penstock_testing

BLOCK, OUTPUT = 32, 8


def test_tier(model: Path, agents: list[Session], node: penstock_testing.Node, tmp_path: Path) -> None:
    """The second engine gets the whole blocks of each prompt from the node, and the same tokens; so it does without the node."""
    prompts = [session.turns[-1].prompt for session in agents]
    # On a busy machine a node that is well may take its time.
    tier = {"type": "PenstockTier", "module_path": "penstock.vllm", "servers": node.address, "retry_interval": 0.5}
    tier |= {"connect_timeout": 120, "lookup_timeout": 60, "load_timeout": 60, "store_timeout": 60}
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CopySpec", "spec_module_path": "vllm_copy_spec", "cpu_bytes_to_use": 256 << 20, "secondary_tiers": [tier],
        },
    }  # fmt: skip

    with Engine("vllm_driver.py", {}, log=tmp_path / "log") as host:

        def start(name: str) -> None:
            host.call("start", name=name, model=str(model), connector=connector, options={}, timeout=600)

        def call(name: str, function: str, **arguments: Any) -> Any:
            return host.call("call", name=name, function=function, timeout=600, **arguments)

        def generate(name: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
            """Return the tokens of each prompt, and how many of its tokens were cached."""
            answers = call(name, "generate", prompts=prompts, output=OUTPUT)
            return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]

        # Nothing is stored yet, so these are the tokens without Penstock.
        start("first")
        want, _ = generate("first", prompts)
        host.call("stop", name="first")

        start("second")
        got, cached = generate("second", prompts)
        assert got == want
        # A prompt of whole blocks counts as cached to its end, although the engine computes its last token again.
        assert cached == [len(prompt) // BLOCK * BLOCK for prompt in prompts]

        # A reset of the connector, as after a weight update: what the node has is of another epoch.
        assert call("second", "reset", connector=True)
        assert generate("second", prompts[:1]) == (want[:1], [0])

        # The node is killed while requests run.
        host.submit("call", name="second", function="generate", prompts=prompts, output=OUTPUT)
        node.kill()
        assert [answer["tokens"] for answer in host.result("call", timeout=600)] == want
        assert call("second", "reset", connector=False)
        assert generate("second", prompts)[0] == want
        host.call("stop", name="second")
