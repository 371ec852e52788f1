"""The messages between the two sides of PenstockDualPath.

An attempt is one try of the planner to serve a request on a prefill and a decode engine. A job is the engine's part of an
attempt.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from penstock import _adapter
from penstock._cluster import ActionKind, Member, Part
from penstock.vllm import _layout, _plan

__all__ = ["EVENTS", "Append", "Definition", "Ended", "Job", "Options", "Order", "Plan", "Progress", "Report", "Step", "Stopped"]

EVENTS = {
    **{
        name: _plan.EVENTS[name]
        for name in (
            "unavailable",
            "unnamed",
            "hit_tokens",
            "loads",
            "load_failures",
            "failed_blocks",
            "saved_blocks",
            "dropped_blocks",
            "epochs",
        )
    },
    "attempts": "Attempts at requests that the planner gave this engine.",
    "attempts_failed": "Attempts that failed here. The planner plans their requests again.",
}
"""Events that PenstockDualPath counts, each the metric vllm:penstock_EVENT_total of the engine."""


@dataclass(frozen=True)
class Options(_adapter.Connection):
    """The options in kv_connector_extra_config, then the variables PENSTOCK_NAME. Times are in seconds.

    Token and certificates are for the nodes and for the planner.
    """

    planner: str = ""
    """host:port of the planner's gRPC."""
    engine: str = ""
    """The name of this engine at planner and gateway. It is unique in the cluster."""
    group: str = ""
    """The name of the group, of which the engine is the only member; default: the name of the engine."""
    machine: str = field(default_factory=socket.gethostname)
    """The name of the machine whose storage NIC the engine uses; default: the host name."""
    model: str = ""
    """Name of the model in the namespace's name; default: the engine's name of the model."""
    listen: str = "127.0.0.1:0"
    """Address at which engines of the other side reach this one: the address of the compute NIC."""
    buffer_mib: int = 256
    """MiB of DRAM through which prompts pass. A decode engine needs room for the KV of its longest prompt."""
    verify: str = "every-hop"
    """The verification of KV between the engines: see ``penstock.Traffic``."""
    start_timeout: float = 10.0
    """Time for which a request waits for the planner's order. After that the engine computes the request alone."""
    job_timeout: float = 120.0
    """Time limit of one request's transfers, from its order to the end of its prefill."""
    layer_timeout: float = 10.0
    """Time for which a forward pass waits for a layer, which comes from DRAM and from the decode engine."""
    append_timeout: float = 1.0
    """Time for which a step waits for memory for a decoded block. After that the block is not stored."""


@dataclass(frozen=True)
class Definition(_layout.Definition):
    """The namespace of the engine's one rank, and the engine as a member of its group."""

    member: Member = field(kw_only=True)


@dataclass(frozen=True)
class Job:
    """An engine's part of an attempt. Lengths are in blocks."""

    name: str
    """The attempt's name."""
    request: str
    """The engine's id of the request."""
    ids: bytes
    """The ids of the prompt's full blocks."""
    epoch: int
    blocks: int
    """The length of the whole prompt, whose last block may be partly filled."""
    hit: int
    parts: tuple[Part, ...]
    """The ranges of the first ``hit`` blocks that this engine reads."""
    peer_address: bytes
    peer_token: bytes
    pages: tuple[int, ...] = ()
    """On a decode engine: its blocks for the whole prompt."""


@dataclass(frozen=True)
class Order:
    """An order of the planner about a running attempt: READ, CUT or RECOMPUTE."""

    name: str
    kind: ActionKind
    part: Part | None


@dataclass(frozen=True)
class Step:
    """The part of a prompt that a prefill engine computes in this step."""

    name: str
    pages: tuple[int, ...]
    """The engine's blocks after those of earlier steps."""
    computed: int
    """The blocks before this one are computed by the end of the step."""


@dataclass(frozen=True)
class Append:
    """A block that this step fills, on a decode engine."""

    name: str
    ids: bytes
    """The chain up to the block."""
    epoch: int
    page: int


@dataclass
class Plan:
    """The work that begins in one step."""

    cancels: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    """Finished requests whose job has ended: the engine may reuse their blocks."""
    lost: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Requests that wait for a load that will not begin, with their blocks."""
    idle: bool = False
    """The engine computes nothing in this step."""


@dataclass(frozen=True)
class Progress:
    """A part has been read up to a block, and the given number of its bytes has arrived."""

    part: Part
    upto: int
    bytes: int


@dataclass(frozen=True)
class Stopped:
    """The read of a part has ended before a block. gone: storage does not have that block."""

    part: Part
    upto: int
    gone: bool


@dataclass(frozen=True)
class Ended:
    """A job has ended and no longer accesses the KV cache. failure is empty after a success."""

    failure: str
    intact: int
    """The first cached blocks that are certainly intact."""


@dataclass
class Report:
    """The worker's report after a step, by the name of the attempt."""

    loaded: dict[str, int] = field(default_factory=dict)
    """Storage has been read. The value is the first block that the model has to compute."""
    reads: list[tuple[str, Progress | Stopped]] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    """By rank: the epoch that a worker's hook has begun."""

    def merge(self, other: Report) -> Report:
        return Report(
            {**self.loaded, **other.loaded}, self.reads + other.reads, {**self.ended, **other.ended}, {**self.epochs, **other.epochs}
        )
