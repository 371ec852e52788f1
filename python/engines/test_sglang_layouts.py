"""SGLang's engine with other layouts of its host pools than page_first_direct, which the other tests of engines have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.faults import penstock
from harness.model import make_llama, make_minicpm
from harness.sessions import Session
from harness.sglang import Follower, SGLang, loaded, storage, tokens, views, whole

from penstock import Store, testing


@pytest.fixture
def engine(sglang: SGLang) -> Iterator[SGLang]:
    yield sglang
    sglang.stop()


@pytest.mark.parametrize(
    ("make", "layout", "io"),
    [(make_llama, "page_first", "kernel"), (make_minicpm, "page_first", "kernel"), (make_minicpm, "layer_first", "direct")],
)
def test_layout(
    engine: SGLang, node: testing.Node, agents: list[Session], make: Callable[[Path], Path], layout: str, io: str, tmp_path: Path
) -> None:
    """A fresh engine loads each whole page that an engine has stored."""
    prompts = [max((turn.prompt for turn in session.turns), key=len) for session in agents[:8]]
    model = make(tmp_path)
    options: dict[str, Any] = {"hicache_mem_layout": layout, "hicache_io_backend": io}
    engine.start(model, None, **options)
    want = tokens(engine.generate(prompts))
    assert len({tuple(one) for one in want}) == len(prompts), "the model's tokens differ from prompt to prompt"

    engine.attach(storage(node))
    answers = engine.fresh(prompts)
    assert (tokens(answers), loaded(answers)) == (want, [0] * len(prompts)), "the node was empty"
    (made,) = penstock("ns", "list", "--server", node.address)["namespaces"]
    assert made["geometry"]["layout"].split()[0] == layout
    with Store(node.address) as store:
        (namespace,) = views(node, store).values()
        follower = Follower(node)
        follower.wait(namespace, prompts)
        follower.close()

    engine.start(model, storage(node), **options)
    answers = engine.generate(prompts)
    assert tokens(answers) == want
    assert [a["cached"] for a in answers] == [{"device": 0, "host": 0, "storage": whole(p)} for p in prompts]
