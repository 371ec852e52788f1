"""The messages between the scheduler's side and the workers' side of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock import _adapter

__all__ = ["EVENTS", "LIVE_MAX", "NULL", "Blocks", "Load", "Options", "Plan", "Report", "Save"]

NULL = 0
"""The id of the null block. It stands for blocks outside a layer's window."""

LIVE_MAX = 16
"""The maximum number of live epochs of a namespace: PENSTOCK_LIVE_MAX of penstock.h."""

Blocks = list[list[int]]
"""The engine's blocks of consecutive blocks of a prompt: a list for each KV cache group, all of one length."""

EVENTS = {
    "lookups": "Lookups that the nodes answered.",
    "lookup_failures": "Lookups that no node answered in time.",
    "unavailable": "Requests that were served without the cache, because no node is reachable or the nodes refuse.",
    "unnamed": "Requests that were served without the cache, because their LoRA adapter, image or epoch cannot be identified.",
    "older_hits": "Requests that took KV of an older epoch than they name.",
    "hit_tokens": "Tokens that lookups found in addition to the engine's own.",
    "loads": "Loads that were started.",
    "load_failures": "Loads of which a block was not delivered in time and verified.",
    "loaded_bytes": "Bytes that were loaded and verified.",
    "failed_blocks": "Blocks that were not loaded, and that the engine computes.",
    "saves": "Saves that were started.",
    "save_failures": "Saves that the node did not take in whole.",
    "saved_blocks": "Blocks that are stored, by rank, including blocks that were stored before.",
    "saved_bytes": "Bytes that were sent.",
    "dropped_blocks": "Blocks that were not saved: too many saves were running, or an earlier block of the request was refused.",
    "epochs": "New epochs, after weight updates.",
}
"""Events that the connector counts, each the metric vllm:penstock_EVENT_total of the engine."""


@dataclass(frozen=True)
class Options(_adapter.Connection):
    """The options in kv_connector_extra_config, then the variables PENSTOCK_NAME. Times are in seconds."""

    model: str = ""
    """Name of the model in the namespace's name; default: the engine's name of the model."""
    lookup_timeout: float = 1.0
    """Time limit of a lookup. A request waits for it before it is scheduled."""
    load: Literal["async", "layers"] = "async"
    """async: a request is scheduled when its load is complete. layers: a request is scheduled at once, and each layer of the
    forward pass waits for the KV of that layer."""
    layers_per_read: int = 4
    """With "layers": number of layers that one read loads. With few layers the first layer begins early, with many there
    are fewer reads."""
    load_timeout: float = 10.0
    """Time limit of a load. The engine computes the blocks that have not arrived by then."""
    save_timeout: float = 30.0
    """Time limit of a save. The engine does not reuse a block until its save has ended."""
    live_epochs: int = 1
    """Number of epochs that stay live when a request names a new one, including the new one; from 1 to 16."""
    save_blocks: int = 0
    """Maximum number of blocks that are kept for saves; further blocks are dropped. 0: an eighth of the KV cache."""


@dataclass(frozen=True)
class Load:
    """Blocks first and following of a prompt are copied from the node into the engine's blocks."""

    job: int
    request: str
    keys: bytes
    first: int
    blocks: Blocks
    epoch: int = 0
    """The epoch in the request. 0: the epoch of the plan."""


@dataclass(frozen=True)
class Save:
    """The engine's blocks are copied to the node, as blocks first and following of a prompt."""

    job: int
    keys: bytes
    first: int
    blocks: Blocks
    epoch: int = 0
    """As in Load."""

    @property
    def end(self) -> int:
        return self.first + len(self.blocks[0])


@dataclass
class Plan:
    """The transfers that begin in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    """The epoch of each rank's namespace, for requests that name none."""


@dataclass
class Report:
    """The workers' report after a step."""

    saves: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By job: how many ranks have ended it, and the least number of its blocks that one of these ranks has stored."""
    loads: dict[int, int] = field(default_factory=dict)
    """With "layers", by job: how many ranks have ended it."""
    epochs: dict[int, int] = field(default_factory=dict)
    """By rank: the epoch that a worker's hook has begun."""

    def merge(self, other: Report) -> Report:
        saves = dict(self.saves)
        for job, (ranks, stored) in other.saves.items():
            before, least = saves.get(job, (0, stored))
            saves[job] = (before + ranks, min(least, stored))
        loads = {job: self.loads.get(job, 0) + other.loads.get(job, 0) for job in {**self.loads, **other.loads}}
        return Report(saves, loads, {**self.epochs, **other.epochs})
