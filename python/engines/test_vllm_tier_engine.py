"""vLLM's own engine on PenstockTier: engines, one after the other, on one node."""

from __future__ import annotations

from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, RANKS, Vllm, tier

from penstock import testing as penstock_testing


def generate(vllm: Vllm, name: str, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each prompt, and how many of its tokens were cached."""
    answers = vllm.generate(name, prompts)
    return [answer["tokens"] for answer in answers], [answer["cached"] for answer in answers]


def whole_blocks(prompts: list[list[int]]) -> list[int]:
    """Return how many tokens are cached: a prompt of whole blocks counts to its end, although the engine computes its last token again."""
    return [len(prompt) // BLOCK * BLOCK for prompt in prompts]


def test_tier(vllm: Vllm, agents: list[Session], node: penstock_testing.Node) -> None:
    """The second engine gets the whole blocks of each prompt from the node, and the same tokens; so it does without the node."""
    prompts = [session.turns[-1].prompt for session in agents]
    connector = tier(node, retry_interval=0.5)

    # Nothing is stored yet, so these are the tokens without Penstock.
    vllm.start("one", connector)
    want, _ = generate(vllm, "one", prompts)
    vllm.stop("one")

    vllm.start("two", connector)
    got, cached = generate(vllm, "two", prompts)
    assert got == want
    assert cached == whole_blocks(prompts)

    # A reset of the connector, as after a weight update: what the node has is of another epoch.
    assert vllm.call("two", "reset", connector=True)
    assert generate(vllm, "two", prompts[:1]) == (want[:1], [0])

    # The node is killed while requests run.
    vllm.host.submit("call", name="two", function="generate", prompts=prompts, output=OUTPUT)
    node.kill()
    assert [answer["tokens"] for answer in vllm.host.result("call", timeout=600)] == want
    assert vllm.call("two", "reset", connector=False)
    assert generate(vllm, "two", prompts)[0] == want
    vllm.stop("two")


def test_two_ranks(vllm: Vllm, agents: list[Session], node: penstock_testing.Node) -> None:
    """A row of the tier has the blocks of both ranks, and an engine of one rank does not find it."""
    prompts = [session.turns[-1].prompt for session in agents[:8]]
    vllm.start("pair", tier(node), **RANKS)
    want, _ = generate(vllm, "pair", prompts)
    vllm.stop("pair")

    vllm.start("next", tier(node), **RANKS)
    assert generate(vllm, "next", prompts) == (want, whole_blocks(prompts))
    assert vllm.call("next", "reset", connector=True)
    assert generate(vllm, "next", prompts[:1]) == (want[:1], [0])
    vllm.stop("next")

    vllm.start("single", tier(node))
    assert generate(vllm, "single", prompts[:1]) == (want[:1], [0])
    vllm.stop("single")
