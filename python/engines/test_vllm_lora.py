"""LoRA adapters in vLLM's own engine: what identifies an adapter in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.model import make_adapter
from harness.sessions import Session
from harness.vllm import BLOCK, Answer, Stored, Vllm, connector, tier

from penstock import testing

# vLLM on the CPU computes a request without an adapter, in a batch that has adapters, with the adapter in its last slot. So
# there is one slot more than there are adapters.
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
"""Options of an engine that takes two adapters."""

Adapter = dict[str, Any]


def adapter(name: str, number: int, path: Path) -> Adapter:
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(path)}


def generate(vllm: Vllm, engine: str, prompts: list[list[int]], adapters: list[Adapter | None]) -> list[list[Answer]]:
    """Return the answers to the prompts with each adapter. All requests are in one batch."""
    answers = vllm.generate(engine, prompts * len(adapters), adapters=[a for a in adapters for _ in prompts])
    return [answers[i : i + len(prompts)] for i in range(0, len(answers), len(prompts))]


def tokens_of(answers: list[list[Answer]]) -> list[list[list[int]]]:
    return [[a["tokens"] for a in one] for one in answers]


def cached(answers: list[list[Answer]]) -> list[list[int]]:
    return [[a["cached"] for a in one] for one in answers]


@pytest.fixture(scope="module")
def prompts(agents: list[Session]) -> list[list[int]]:
    return [session.turns[1].prompt for session in agents[:4]]


@pytest.fixture
def red(vllm: Vllm, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "red", Path(vllm.model), seed=1)


@pytest.fixture
def blue(vllm: Vllm, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "blue", Path(vllm.model), seed=2)


@pytest.fixture(scope="module")
def plain(vllm: Vllm, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """The tokens of an engine without Penstock: of the model alone, of the red adapter, and of the blue one."""
    directory = tmp_path_factory.mktemp("adapters")
    paths = [make_adapter(directory / str(seed), Path(vllm.model), seed=seed) for seed in (1, 2)]
    vllm.start("lora alone", None, **LORA)
    kinds = [None, *(adapter(f"a{i}", i, path) for i, path in enumerate(paths, 1))]
    tokens = [tokens_of(generate(vllm, "lora alone", prompts, [kind]))[0] for kind in kinds]
    vllm.stop("lora alone")
    for one in zip(*tokens, strict=True):
        assert len({tuple(t) for t in one}) == len(kinds)
    return tokens


def swap(a: Path, b: Path) -> None:
    """Exchange the names of two directories."""
    aside = a.rename(a.with_name("aside"))
    b.rename(a)
    aside.rename(b)


def test_adapters_across_processes(
    vllm: Vllm, prompts: list[list[int]], plain: list[list[list[int]]], red: Path, blue: Path, node: testing.Node
) -> None:
    """An adapter is the content of its files. Its name, number and path are those of one process."""
    vllm.start("writer", connector(node), **LORA)
    answers = generate(vllm, "writer", prompts, [None, adapter("red", 1, red), adapter("blue", 2, blue)])
    assert tokens_of(answers) == plain
    assert vllm.call("writer", "counters")["unnamed"] == 0
    vllm.stop("writer")
    stored = Stored()
    for prompt, answer in zip(prompts, answers[0], strict=True):
        stored.add(prompt, answer["tokens"])
    want = [stored.cached(prompt) for prompt in prompts]
    assert min(want) > 0

    # In the next process each adapter has the name, the number and the path that the other one had.
    swap(red, blue)
    vllm.start("reader", connector(node), **LORA)
    answers = generate(vllm, "reader", prompts, [None, adapter("blue", 2, blue), adapter("red", 1, red)])
    assert tokens_of(answers) == plain
    assert cached(answers) == [want] * 3
    assert vllm.call("reader", "counters")["unnamed"] == 0

    # An adapter that no process has used, under the name of one that is stored.
    green = make_adapter(red.with_name("green"), Path(vllm.model), seed=3)
    answers = generate(vllm, "reader", prompts, [adapter("blue", 3, green)])
    assert cached(answers) == [[0] * len(prompts)]
    assert tokens_of(answers)[0] not in plain

    # The files of both are replaced under the engine, which continues to use the old weights. Their KV is not stored as that of the new
    # files, and the KV of the new files is not loaded.
    swap(red, blue)
    assert vllm.call("reader", "reset")
    before = vllm.call("reader", "counters")
    answers = generate(vllm, "reader", prompts, [adapter("blue", 2, blue), adapter("red", 1, red)])
    assert tokens_of(answers) == plain[1:]
    assert cached(answers) == [[0] * len(prompts)] * 2
    after = vllm.call("reader", "counters")
    assert after["unnamed"] - before["unnamed"] == 2 * len(prompts)
    assert (after["saves"], after["loads"]) == (before["saves"], before["loads"])
    vllm.stop("reader")
    log = [line for line in vllm.host.log.read_text().splitlines() if "have changed while the engine used them" in line]
    assert sorted(str(path) in line for path in (red, blue) for line in log) == [False, False, True, True]

    # An engine without LoRA has the same KV of the model alone.
    vllm.start("without lora", connector(node))
    answers = [vllm.generate("without lora", prompts)]
    assert (tokens_of(answers), cached(answers)) == (plain[:1], [want])
    vllm.stop("without lora")


def test_adapters_of_the_tier(
    vllm: Vllm, prompts: list[list[int]], plain: list[list[list[int]]], red: Path, blue: Path, node: testing.Node
) -> None:
    """The tier has vLLM's block hashes, in which an adapter is its name and its path: its number may be another one."""
    vllm.start("tier writer", tier(node), **LORA)
    answers = generate(vllm, "tier writer", prompts, [None, adapter("red", 1, red), adapter("blue", 2, blue)])
    assert tokens_of(answers) == plain
    vllm.stop("tier writer")

    vllm.start("tier reader", tier(node), **LORA)
    answers = generate(vllm, "tier reader", prompts, [None, adapter("red", 2, red), adapter("blue", 1, blue)])
    assert tokens_of(answers) == plain
    assert cached(answers) == [[len(prompt) // BLOCK * BLOCK for prompt in prompts]] * 3
    # Under another path, or another name, it is another adapter.
    moved = red.rename(red.with_name("moved"))
    answers = generate(vllm, "tier reader", prompts[:1], [adapter("red", 3, moved), adapter("pink", 1, blue)])
    assert tokens_of(answers) == [plain[1][:1], plain[2][:1]]
    assert cached(answers) == [[0], [0]]
    vllm.stop("tier reader")
