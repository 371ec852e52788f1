"""What the workers of a server have for its /collective_rpc, which reaches methods by name (vLLM's --worker-extension-cls)."""

from __future__ import annotations

import os


class Calls:
    def begin_version(self, version: str) -> int:
        """Begin the epoch of new weights, as collective_rpc(penstock.vllm.new_weights) does."""
        from penstock.vllm import new_weights

        epoch: int = new_weights(self, int(version))
        return epoch

    def process(self) -> int:
        """Return the process id of the worker."""
        return os.getpid()
