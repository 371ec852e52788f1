"""Images in vLLM's own engine: a tiny LLaVA model whose prompts have equal tokens and different images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.model import IMAGE, IMAGE_TOKENS, make_adapter, make_llava
from harness.sessions import Session
from harness.vllm import BLOCK, Vllm, connector

from penstock import testing

# The image begins within the second block and ends within the fourth.
BEFORE, AFTER = 40, 100
WHOLE = (BEFORE + IMAGE_TOKENS + AFTER) // BLOCK * BLOCK

OPTIONS: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1}}
TOWER: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "enable_tower_connector_lora": True}
"""Options of an engine in which two adapters change the encoder of images too."""


def test_images_across_processes(vllm: Vllm, tmp_path: Path, agents: list[Session], node: testing.Node) -> None:
    """Blocks in front of an image are shared. A block with a part of it, and all blocks behind it, belong to that image."""
    model = make_llava(tmp_path / "llava")
    text = agents[0].turns[1].prompt
    prompt = [*text[:BEFORE], IMAGE, *text[BEFORE : BEFORE + AFTER]]

    def generate(engine: str, *images: int) -> tuple[list[list[int]], list[int]]:
        """Return the tokens of the prompt with each image, and how many were cached; one request after the other."""
        answers = [vllm.generate(engine, [prompt], images=[image])[0] for image in images]
        return [a["tokens"] for a in answers], [a["cached"] for a in answers]

    vllm.start("images alone", None, model=model, **OPTIONS)
    one, other, third = generate("images alone", 1, 2, 3)[0]
    assert len({tuple(one), tuple(other), tuple(third)}) == 3
    vllm.stop("images alone")

    vllm.start("images", connector(node), model=model, **OPTIONS)
    assert generate("images", 1, 2) == ([one, other], [0, BEFORE // BLOCK * BLOCK])
    vllm.stop("images")

    vllm.start("images again", connector(node), model=model, **OPTIONS)
    assert generate("images again", 3, 2, 1) == ([third, other, one], [BEFORE // BLOCK * BLOCK, WHOLE, WHOLE])
    assert vllm.call("images again", "counters")["unnamed"] == 0
    vllm.stop("images again")

    # Without these two caches vLLM numbers images and does not hash them. The numbers of another process are those of other images.
    numbers = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    vllm.start("images numbered", connector(node), model=model, **OPTIONS, **numbers)
    assert generate("images numbered", 2, 1) == ([other, one], [0, 0])
    seen = vllm.call("images numbered", "counters")
    assert (seen["unnamed"], seen["saves"]) == (2, 0)
    assert [a["cached"] for a in vllm.generate("images numbered", [text])] == [BEFORE // BLOCK * BLOCK]
    seen = vllm.call("images numbered", "counters")
    assert (seen["unnamed"], seen["saves"] > 0) == (2, True)
    vllm.stop("images numbered")


def test_images_of_an_adapter(vllm: Vllm, tmp_path: Path, agents: list[Session], node: testing.Node) -> None:
    """An adapter that changes the encoder of images has KV of its own, which is found under another name of the adapter. vLLM keeps encoded
    images under the adapter's name, so an image is not cached when the name has had another path."""
    model = make_llava(tmp_path / "llava")
    red, blue = (str(make_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("red", "blue"), 1))
    text = agents[0].turns[1].prompt
    prompt = [*text[:BEFORE], IMAGE, *text[BEFORE : BEFORE + AFTER]]

    def generate(engine: str, *loras: tuple[str, int, str] | None) -> tuple[list[list[int]], list[int]]:
        adapters = [None if lora is None else dict(zip(("lora_name", "lora_int_id", "lora_path"), lora, strict=True)) for lora in loras]
        answers = [vllm.generate(engine, [prompt], images=[1], adapters=[adapter])[0] for adapter in adapters]
        return [a["tokens"] for a in answers], [a["cached"] for a in answers]

    vllm.start("tower alone", None, model=model, enable_prefix_caching=False, **OPTIONS, **TOWER)
    wanted = generate("tower alone", None, ("red", 1, red), ("blue", 2, blue))[0]
    assert len(set(map(tuple, wanted))) == 3
    vllm.stop("tower alone")

    vllm.start("tower", connector(node), model=model, **OPTIONS, **TOWER)
    assert generate("tower", None, ("red", 1, red), ("blue", 2, blue)) == (wanted, [0, 0, 0])
    vllm.stop("tower")

    vllm.start("tower again", connector(node), model=model, **OPTIONS, **TOWER)
    assert generate("tower again", ("scarlet", 1, red), ("navy", 2, blue)) == (wanted[1:], [WHOLE, WHOLE])
    assert vllm.call("tower again", "counters")["unnamed"] == 0
    assert generate("tower again", ("scarlet", 3, blue))[1] == [0]
    assert vllm.call("tower again", "counters")["unnamed"] == 1
    vllm.stop("tower again")
