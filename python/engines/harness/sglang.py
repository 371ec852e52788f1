"""SGLang's engines in forks of one process, and their values on a node."""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from harness.faults import penstock
from harness.process import HERE, Engine
from penstock import Namespace, Store, testing
from penstock._program import program

PAGE = 16
OUTPUT = 8
# Longer than the slowest engine of a busy machine needs, and shorter than a test that hangs.
PATIENCE = 900


def storage(node: testing.Node, **more: Any) -> dict[str, Any]:
    """The configuration of Penstock, as in docs/engines.md. On a busy machine a node that is well may take its time."""
    return {
        "backend_name": "penstock", "module_path": "penstock.sglang", "class_name": "PenstockHiCache", "interface_v1": 1,
        "prefetch_threshold": PAGE, "servers": node.address, "timeout": 60, "connect_timeout": 120, **more,
    }  # fmt: skip


class SGLang:
    """A process that has imported SGLang and runs one engine at a time. It is a context manager, which ends the process."""

    def __init__(self, log: Path) -> None:
        path = [str(HERE), str(HERE / "sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = Engine("sglang_driver.py", {}, log=log, env={"PYTHONPATH": os.pathsep.join(path)}, start=PATIENCE)
        self.log = log

    def __enter__(self) -> SGLang:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()

    def start(self, model: Path, backend: dict[str, Any] | None, *, page: int = PAGE, **options: Any) -> None:
        """End the engine, if there is one, and make another in new processes, with further options of SGLang."""
        self.process.call("start", model=str(model), page=page, storage=backend, timeout=PATIENCE, **options)

    def stop(self) -> None:
        """End the engine."""
        self.process.call("stop")

    def generate(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self.process.call("generate", prompts=prompts, output=OUTPUT, timeout=PATIENCE)
        return answers

    def fresh(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Generate with empty caches on the device and the host."""
        assert self.process.call("flush")
        return self.generate(prompts)

    def attach(self, backend: dict[str, Any]) -> None:
        assert self.process.call("attach", storage=backend) == ""

    def detach(self) -> None:
        assert self.process.call("detach")

    def update(self, model: Path, version: str | None) -> None:
        assert self.process.call("update", model=str(model), version=version, timeout=PATIENCE) == ""


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def loaded(answers: list[dict[str, Any]]) -> list[int]:
    """How many tokens of each prompt came from the storage."""
    return [answer["cached"]["storage"] for answer in answers]


def whole(prompt: list[int], page: int = PAGE) -> int:
    """How many tokens of a prompt can be cached: its whole pages, but for the last token, which is computed."""
    return (len(prompt) - 1) // page * page


def page_keys(prompt: list[int], page: int = PAGE) -> list[str]:
    """The keys of a prompt's pages for the first version of the weights, as docs/engines.md has them."""
    salt = hashlib.sha256(b"default").hexdigest()[:16]
    found, prior = [], b""
    for start in range(0, whole(prompt, page), page):
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt[start : start + page])
        prior = hashlib.sha256(prior + tokens).digest()
        found.append(f"{salt}:{prior.hex()}")
    return found


class Follower:
    """Waits for blocks on a node, by its events."""

    def __init__(self, node: testing.Node) -> None:
        command = [str(program()), "events", "--server", node.address, "--format", "json", "--after", "1", "--timeout", f"{PATIENCE}s"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._lines = b""

    def events(self) -> list[dict[str, Any]]:
        """Return the next events; none if there is none for a second."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        if select.select([fd], [], [], 1)[0]:
            data = os.read(fd, 1 << 16)
            assert data, "penstock events has ended"
            self._lines += data
        *lines, self._lines = self._lines.split(b"\n")
        return [json.loads(line) for line in lines]

    def wait(self, namespace: Namespace, prompts: list[list[int]]) -> None:
        """Wait until all pages of the prompts are stored."""
        for prompt in prompts:
            keys = page_keys(prompt)
            while keys and namespace.match(keys).prefix < len(keys):
                self.events()  # an event may come before a look-up finds its blocks

    def wait_for_any(self, epoch: int) -> None:
        """Wait until a block of this epoch is stored."""
        while not any(event["kind"] == "block_stored" and event["epoch"] == epoch for event in self.events()):
            pass

    def close(self) -> None:
        self._process.kill()  # it blocks on its full standard output, which the test does not read
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def views(node: testing.Node, store: Store) -> dict[str, Namespace]:
    """The node's namespaces by name, as engines made them."""
    found = {}
    for it in penstock("ns", "list", "--server", node.address)["namespaces"]:
        geometry = it["geometry"]
        (group,) = geometry["groups"]
        found[it["name"]] = store.namespace(
            it["name"], block_tokens=geometry["block_tokens"], layers=group["layers"], token_bytes=group["token_bytes"],
            flat=it["index"] == "flat", dtype=geometry["dtype"], layout=geometry["layout"],
        )  # fmt: skip
    return found
