"""The README's commands for vLLM."""

from __future__ import annotations

import json
from pathlib import Path

from harness import readme
from harness.sessions import Session
from harness.vllm import OUTPUT, PATIENT, Stored, Vllm, connector


def test_readme(vllm: Vllm, agents: list[Session], tmp_path: Path) -> None:
    """vLLM's server answers a request with the tokens of another engine, and gets the prompt's blocks from the node."""
    prompt = agents[0].turns[1].prompt
    pip, serve, server = readme.commands("vllm.entrypoints")
    readme.install(pip, tmp_path)
    with readme.node(serve, tmp_path) as address:
        vllm.start("writer", connector(address))
        (answer,) = vllm.generate("writer", [prompt])
        vllm.stop("writer")
        stored = Stored()
        stored.add(prompt, answer["tokens"])

        (port,) = readme.ports(1)
        # The model, its dtype, and a machine without GPU and with little memory.
        command = readme.replace(server, {"MODEL": vllm.model, "127.0.0.1:7420": address})
        command += (
            f" --port {port} --host 127.0.0.1 --dtype float32 --max-model-len 1024 --distributed-executor-backend uni --enforce-eager"
        )
        environ = {f"PENSTOCK_{name.upper()}": str(value) for name, value in PATIENT.items()}
        environ |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        with readme.Server(command, "Application startup complete", log=tmp_path / "vllm.log", env=environ):
            request = {
                "model": vllm.model,
                "prompt": prompt,
                "max_tokens": OUTPUT,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            got = json.loads(readme.http(port, "/v1/completions", request))
            assert got["choices"][0]["token_ids"] == answer["tokens"]
            metrics = readme.http(port, "/metrics").splitlines()
            hits = [float(line.split()[-1]) for line in metrics if line.startswith("vllm:penstock_hit_tokens_total{")]
            assert hits == [stored.cached(prompt)]
