"""Tests the calls and configurations that ``penstock bench engines`` uses, in vLLM's own engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.process import EngineError
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, Vllm, disk_offload, fs_tier


def test_turns(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """A fresh engine gets the blocks of earlier turns from vLLM's tier of files, and makes the tokens of an engine alone."""
    first, second = agents[0].turns[0].prompt, agents[0].turns[1].prompt
    shared = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    assert shared >= BLOCK  # otherwise this session proves nothing
    configuration = vllm.host.call("configuration", of="fs_tier", directory=str(tmp_path / "tier"))
    assert configuration == fs_tier(str(tmp_path / "tier"))

    vllm.start("alone", None)
    want = [vllm.call("alone", "turn", prompt=prompt, output=OUTPUT) for prompt in (first, second)]
    assert [len(turn["tokens"]) for turn in want] == [OUTPUT, OUTPUT]
    assert [turn["cached"] for turn in want] == [0, shared // BLOCK * BLOCK]
    assert vllm.call("alone", "reset")
    assert [answer["tokens"] for answer in vllm.generate("alone", [first, second])] == [turn["tokens"] for turn in want]
    vllm.stop("alone")

    vllm.start("stores", configuration)
    turn = vllm.call("stores", "turn", prompt=first, output=OUTPUT)
    assert (turn["tokens"], turn["cached"]) == (want[0]["tokens"], 0)
    vllm.stop("stores")

    vllm.start("fresh", configuration)
    pid = vllm.host.call("pid", name="fresh")
    turn = vllm.call("fresh", "turn", prompt=second, output=OUTPUT)
    assert (turn["tokens"], turn["cached"]) == (want[1]["tokens"], shared // BLOCK * BLOCK)
    assert turn["first_token_seconds"] > 0
    assert Path(f"/proc/{pid}").exists()
    vllm.stop("fresh")
    assert not Path(f"/proc/{pid}").exists()


def test_an_engine_that_does_not_start(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """vLLM's offloading to disk needs a GPU. The error is the engine's own, and its name is free again."""
    with pytest.raises(EngineError, match="priority_range"):
        vllm.start("offload", disk_offload(str(tmp_path / "offload")))
    vllm.start("offload", None)
    prompts = vllm.host.call("sessions", count=1, turns=4, tokens=512)
    assert prompts == [[turn.prompt for turn in agents[0].turns]]
    vllm.stop("offload")
