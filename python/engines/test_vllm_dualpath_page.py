"""The commands of docs/dualpath.md: node, planner, two of vLLM's servers, and the gateway."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import readme
from harness.model import make_adapter
from harness.sessions import Session
from harness.vllm import BLOCK, OUTPUT, Stored, Vllm

_TIMEOUT = 300
# For a machine without GPU and with little memory, for a busy one, and for a model without a template for chats.
_TEMPLATE = shlex.quote("{% for m in messages %}{{ m['content'] }}{% endfor %}")
_FLAGS = " --host 127.0.0.1 --dtype float32 --max-model-len 1024 --distributed-executor-backend uni --enforce-eager --chat-template "
_BOUNDS = {f"PENSTOCK_{name}_TIMEOUT": "120" for name in ("CONNECT", "START", "REQUEST", "JOB", "LAYER", "APPEND")}


def _metric(port: int, event: str) -> float:
    lines = readme.http(port, "/metrics").splitlines()
    (value,) = [float(line.split()[-1]) for line in lines if line.startswith(f"vllm:penstock_{event}_total{{")]
    return value


def test_page(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """Requests of all kinds have the tokens of one engine alone, and a later turn's prefix comes from the node."""
    pip, serve, planner, prefill, decode, gateway, curl = readme.commands("PenstockDualPath", "docs/dualpath.md")
    readme.install(pip, tmp_path)
    first = max((turn.prompt for turn in agents[0].turns), key=len)
    first = first[: len(first) // 2]
    adapters = {name: make_adapter(tmp_path / name, Path(vllm.model), seed=seed) for name, seed in (("red", 1), ("blue", 2))}
    # vLLM on the CPU needs one slot more than there are adapters.
    lora = " --enable-lora --max-loras 3 --max-lora-rank 8 --lora-modules " + " ".join(f"{name}={path}" for name, path in adapters.items())
    vllm.start("alone", None, enable_lora=True, max_loras=3, max_lora_rank=8)

    def alone(prompt: list[int], name: str = "") -> list[int]:
        numbers = {name: i for i, name in enumerate(adapters, 1)}
        adapter = {"lora_name": name, "lora_int_id": numbers[name], "lora_path": str(adapters[name])} if name else None
        tokens: list[int] = vllm.generate("alone", [prompt], adapters=[adapter])[0]["tokens"]
        return tokens

    with ExitStack() as stack:
        node = stack.enter_context(readme.node(serve, tmp_path))
        at = stack.enter_context(readme.penstock(planner, tmp_path / "planner.log"))
        addresses = {"127.0.0.1:7420": node, "127.0.0.1:7430": at}
        ports: dict[str, int] = {}
        while len(set(ports.values())) < 2:
            ports = dict(zip(("8001", "8002"), readme.ports(2), strict=True))

        def engine(command: str, port: str) -> readme.Server:
            command = readme.replace(command, {"MODEL": vllm.model, f"--port {port}": f"--port {ports[port]}", **addresses})
            log = tmp_path / f"{port}.log"
            # Two engines whose threads are bound to the same two cores wait for each other.
            environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **_BOUNDS}
            return stack.enter_context(
                readme.Server(command.rstrip("& ") + lora + _FLAGS + _TEMPLATE, "Application startup complete", log=log, env=environ)
            )

        with ThreadPoolExecutor() as pool:
            list(pool.map(engine, (prefill, decode), ports))
        command = readme.replace(gateway, {**{f"127.0.0.1:{port}": f"127.0.0.1:{mine}" for port, mine in ports.items()}, **addresses})
        front = stack.enter_context(readme.penstock(command, tmp_path / "gateway.log"))
        port = int(front.rpartition(":")[2])

        def complete(prompt: list[int] | str, *, stream: bool = False, at: int = port, **fields: Any) -> list[dict[str, Any]]:
            request = {
                "model": vllm.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                "stream": stream, **fields,
            }  # fmt: skip
            text = readme.http(at, "/v1/completions", request)
            if not stream:
                return [json.loads(text)]
            *events, last = [line for line in text.splitlines() if line]
            assert last == "data: [DONE]"
            return [json.loads(event.removeprefix("data: ")) for event in events]

        def tokens(answers: list[dict[str, Any]]) -> list[int]:
            return [token for answer in answers for choice in answer["choices"] for token in choice["token_ids"] or []]

        stored = Stored()
        for stream in (False, True):
            answer = tokens(complete(first, stream=stream))
            assert answer == alone(first)
            stored.add(first, answer)
        second = [*first, *answer, *first[:BLOCK]]
        loaded = _metric(ports["8001"], "hit_tokens")
        end = time.monotonic() + _TIMEOUT
        while (answer := tokens(complete(second))) == alone(second) and _metric(ports["8001"], "hit_tokens") - loaded < stored.cached(
            second
        ):
            # The last block of a turn is stored after the answer.
            assert time.monotonic() < end
            loaded = _metric(ports["8001"], "hit_tokens")
        assert answer == alone(second)

        # A request with a cache salt finds the blocks of requests with that salt only.
        loaded = _metric(ports["8001"], "hit_tokens")
        assert tokens(complete(first, cache_salt="s")) == alone(first)
        assert _metric(ports["8001"], "hit_tokens") == loaded
        while _metric(ports["8001"], "hit_tokens") - loaded < len(first) // BLOCK * BLOCK - BLOCK:
            assert time.monotonic() < end
            loaded = _metric(ports["8001"], "hit_tokens")
            assert tokens(complete(first, cache_salt="s")) == alone(first)

        # Each adapter finds the KV that was computed with it only, of a prompt whose KV without an adapter is stored.
        answers = [alone(first), *(alone(first, name) for name in adapters)]
        assert len(set(map(tuple, answers))) == 3
        for name, answer in zip(adapters, answers[1:], strict=True):
            attempts = _metric(ports["8001"], "attempts")
            loaded = _metric(ports["8001"], "hit_tokens")
            assert tokens(complete(first, model=name)) == answer
            assert _metric(ports["8001"], "hit_tokens") == loaded
            assert _metric(ports["8001"], "attempts") == attempts + 1
        for name, answer in zip(adapters, answers[1:], strict=True):
            for salt in (None, "s"):
                loaded = _metric(ports["8001"], "hit_tokens")
                while _metric(ports["8001"], "hit_tokens") - loaded < (len(first) - 1) // BLOCK * BLOCK:
                    assert time.monotonic() < end
                    loaded = _metric(ports["8001"], "hit_tokens")
                    assert tokens(complete(first, model=name, cache_salt=salt)) == answer
        assert tokens(complete(first)) == answers[0]

        # Text is tokenized by an engine, for completions and for chats.
        assert len(tokens(complete("Once upon a time"))) == OUTPUT
        request = {"model": vllm.model, "messages": [{"role": "user", "content": "Once"}], "max_tokens": OUTPUT, "ignore_eos": True}
        chat = json.loads(readme.http(port, "/v1/chat/completions", request))
        assert chat["usage"]["completion_tokens"] == OUTPUT
        url = readme.replace(curl, {"MODEL": vllm.model, "127.0.0.1:7440": front})
        streamed = subprocess.run(["bash", "-c", url], check=True, capture_output=True, text=True, timeout=_TIMEOUT).stdout
        assert streamed.rstrip().endswith("data: [DONE]")
        assert len(re.findall(r"^data: \{", streamed, re.M)) > 1
        for engine_port in ports.values():
            assert _metric(engine_port, "attempts") > 0
            assert _metric(engine_port, "unavailable") == 0
    vllm.stop("alone")
