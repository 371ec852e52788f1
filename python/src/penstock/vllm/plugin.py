"""The entry point of the group vllm.general_plugins, which vLLM calls in each of its processes."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Register PenstockTier in vLLM as the tier type ``penstock``. It may be called several times."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # this release has no tiers; the other classes work without them
        return
    if "penstock" not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier("penstock", "penstock.vllm.tier", "PenstockTier")
