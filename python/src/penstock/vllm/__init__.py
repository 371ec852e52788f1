"""Penstock for vLLM. ``PenstockConnector`` moves blocks between the engine's KV cache and Penstock, ``PenstockTier``
between vLLM's offloading and Penstock. ``PenstockDualPath`` makes an engine one of a prefill/decode cluster, and
``PenstockDualPathHybrid`` one of a model with recurrent state.

The first use of a class imports vLLM; this package does not. docs/engines.md describes the configuration.
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "PenstockConnector": "penstock.vllm.connector",
    "PenstockDualPath": "penstock.vllm.dualpath",
    "PenstockDualPathHybrid": "penstock.vllm.dualpath",
    "PenstockTier": "penstock.vllm.tier",
    "new_weights": "penstock.vllm.connector",
}

__all__ = ["PenstockConnector", "PenstockDualPath", "PenstockDualPathHybrid", "PenstockTier", "new_weights"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
