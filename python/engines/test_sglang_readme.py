"""The README's commands for SGLang."""

from __future__ import annotations

import json
import os
from pathlib import Path

from harness import readme
from harness.process import HERE
from harness.sessions import Session

PAGE = 64  # as in the README
OUTPUT = 8
# A machine without GPU.
CPU = (
    "--device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-cuda-graph"
    " --disable-overlap-schedule --skip-server-warmup --context-length 1024 --max-running-requests 4 --max-total-tokens 16384"
    " --hicache-storage-prefetch-policy wait_complete"
)


def test_readme(model: Path, agents: list[Session], tmp_path: Path) -> None:
    """SGLang's server answers a request. A second one answers with the same tokens, and loads the prompt's pages from the node."""
    prompt = max((turn.prompt for turn in agents[0].turns), key=len)
    pip, serve, server = readme.commands("sglang.launch_server")
    readme.install(pip, tmp_path)
    path = [str(HERE / "sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"PYTHONPATH": os.pathsep.join(path), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    environ |= {"PENSTOCK_TIMEOUT": "60", "PENSTOCK_CONNECT_TIMEOUT": "120"}
    with readme.node(serve, tmp_path) as address:
        port, internal = readme.ports(2)  # by itself SGLang may take the server's port for its ranks
        command = readme.replace(server, {"MODEL": str(model), "127.0.0.1:7420": address}) + f" --port {port} --nccl-port {internal} {CPU}"
        request = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}}
        answers = []
        for name in ("first", "second"):
            with readme.Server(command, "fired up and ready", log=tmp_path / f"{name}.log", env=environ):
                answers.append(json.loads(readme.http(port, "/generate", request)))
                readme.http(port, "/flush_cache?timeout=120", {})  # it waits until the pages are stored
        first, second = answers
        assert second["output_ids"] == first["output_ids"]
        assert first["meta_info"]["cached_tokens"] == 0
        assert second["meta_info"]["cached_tokens_details"]["storage"] == (len(prompt) - 1) // PAGE * PAGE >= 256
