"""The messages between the two sides of PenstockDualPath.

An attempt is one try of the planner to serve a request on a prefill and a decode engine. A job is the engine's part of an
attempt.

Each block is stored in shards, by KV heads. A rank of the engine has one shard or several, and each shard has a namespace and a
Traffic of its own. A job is a transfer of each shard, all by the one plan of the attempt:

    prefill engine of two ranks              decode engine of one rank
    rank 0  page: shard 0    ═══════════►    page: shard 0, shard 1  rank 0
    rank 1  page: shard 1    ═══════════►

Latent KV (MLA) has no heads, and all ranks have the same. It is one shard, which rank 0 alone transfers and stores. Rank 0 passes to
the other ranks what has arrived, by the engine's own collective:

    prefill engine of two ranks              decode engine of three ranks
    rank 0  page: shard 0    ═══════════►    page: shard 0  rank 0
       │    each layer, before the model                      ├─────► rank 1    the whole prompt, in one step
       ▼    computes it                                       └─────► rank 2
    rank 1  the same page
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock import _adapter, errors
from penstock._cluster import ActionKind, Member, Nic, Part
from penstock._traffic import verify_number
from penstock.vllm import _layout, _plan

__all__ = [
    "EVENTS",
    "Append",
    "Definition",
    "Ended",
    "Fetch",
    "Job",
    "Options",
    "Order",
    "Plan",
    "Progress",
    "Release",
    "Report",
    "Step",
    "Stopped",
    "join_members",
    "split_peer",
]

_T = TypeVar("_T")

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
    "resident_tokens": "Tokens of prompts that a decode engine had in its prefix cache.",
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
    listen_ca_file: str | None = None
    listen_cert_file: str | None = None
    listen_key_file: str | None = None
    """TLS with the engines of the other side: see ``penstock.Traffic``. All engines of a cluster have it, or none."""
    shards: int = 0
    """In how many shards a block is stored, by KV heads: the greatest tensor_parallel_size of the cluster, in every engine. Default:
    the engine's own. Latent KV is one shard, and needs no value."""
    buffer_mib: int = 256
    """MiB of DRAM through which prompts pass, in all ranks together. A decode engine needs room for the KV of its longest
    prompt."""
    verify: str = "every-hop"
    """The verification of KV between the engines: see ``penstock.Traffic``."""
    start_timeout: float = 10.0
    """Time for which a request waits for the planner's order. After that the engine computes the request alone."""
    request_timeout: float = 10.0
    """Time for which an attempt waits until its request arrives in the engine's queue. After that the attempt fails."""
    job_timeout: float = 120.0
    """Time limit of one request's transfers, from its order to the end of its prefill."""
    layer_timeout: float = 10.0
    """Time for which a forward pass waits for a layer, which comes from DRAM and from the decode engine."""
    append_timeout: float = 1.0
    """Time for which a step waits for memory for a decoded block. After that the block is not stored."""


@dataclass(frozen=True)
class Definition(_layout.Definition):
    """The namespace of a shard, whose number is ``rank``, and what its Traffic is in the engine's member of the group."""

    member: Member = field(kw_only=True)
    epoch: int = field(kw_only=True)
    """Of the namespace when it was opened."""


def join_members(definitions: Sequence[Definition]) -> Member:
    """Return the engine as a member of its group, from its shards in their order."""
    first = definitions[0].member
    host = first.address.rpartition(b":")[0] + b":"
    rest = [d.member.address.replace(host, b":", 1) if d.member.address.startswith(host) else d.member.address for d in definitions[1:]]
    return first._replace(
        device_blocks=min(d.member.device_blocks for d in definitions),
        address=b",".join([first.address, *rest]),
        token=b"".join(d.member.token for d in definitions),
    )


def split_peer(address: bytes, token: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """Return address and token of each shard of the engine on the other side, whose member ``join_members`` has made."""
    addresses = address.split(b",")
    host = addresses[0].rpartition(b":")[0]
    size = len(token) // len(addresses)
    return tuple((host + a if a.startswith(b":") else a, token[i * size : (i + 1) * size]) for i, a in enumerate(addresses))


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
    """The length of the whole prompt, whose last block may be partly filled. With recurrent state: of its full blocks before the last
    token."""
    hit: int
    parts: tuple[Part, ...]
    """The ranges of the first ``hit`` blocks that this engine reads."""
    peers: tuple[tuple[bytes, bytes], ...]
    """Address and token of each shard of the engine on the other side."""
    pages: tuple[int, ...] = ()
    """On a decode engine: its blocks for the whole prompt, each as one page in each of the engine's KV cache groups."""
    resident: int = 0
    """How many of the first ``pages`` are of the engine's prefix cache. They have their KV, and other requests read them."""


@dataclass(frozen=True)
class Order:
    """An order of the planner about a running attempt: READ, CUT or RECOMPUTE."""

    name: str
    kind: ActionKind
    part: Part | None


@dataclass(frozen=True)
class Fetch:
    """A prefill engine with recurrent state has blocks for the cached prefix, which is loaded before the request is scheduled."""

    name: str
    request: str
    pages: tuple[int, ...]
    """As in Job."""


@dataclass(frozen=True)
class Step:
    """The part of a prompt that a prefill engine computes in this step."""

    number: int
    """No other step of the engine has it."""
    name: str
    first: bool
    """The cached prefix is loaded in this step."""
    hit: int
    """The number of its blocks, if it is loaded in this step."""
    pages: tuple[int, ...]
    """The engine's blocks after those of earlier steps, as in Job."""
    computed: int
    """The blocks before this one are computed by the end of the step."""


@dataclass(frozen=True)
class Release:
    """A step that all ranks have taken with the right KV. What it has computed of the last layer leaves now.

    Each rank computes with what the others have computed. When a rank has not loaded a layer, all ranks have computed the layers
    behind it from garbage, which must not become a block on the decode engine. A block without its last layer is none.
    """

    name: str
    computed: int


@dataclass(frozen=True)
class Append:
    """A block that this step fills, on a decode engine."""

    name: str
    ids: bytes
    """The chain up to the block."""
    epoch: int
    pages: tuple[int, ...]
    """One in each of the engine's KV cache groups."""


@dataclass
class Plan:
    """The work that begins in one step."""

    cancels: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    """Finished requests whose job has ended: the engine may reuse their blocks."""
    lost: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Requests that wait for a load that will not begin, with their blocks. With latent KV: also of a load that has failed on rank 0."""
    received: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Requests whose prompt rank 0 has in its blocks, and passes to the other ranks in this step."""
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
    """A shard's transfer has ended and no longer accesses the KV cache. failure is empty after a success."""

    failure: str
    intact: int
    """The first cached blocks that are certainly intact."""
    cancelled: bool = False
    """The failure of another transfer has ended it."""


@dataclass
class Report:
    """The report of one worker, or of all workers, after a step, by the name of the attempt and the number of the shard."""

    loaded: dict[str, dict[int, int]] = field(default_factory=dict)
    """Storage has been read. The value is the first block that the model has to compute."""
    reads: list[tuple[str, int, Progress | Stopped]] = field(default_factory=list)
    ended: dict[str, dict[int, Ended]] = field(default_factory=dict)
    taken: dict[int, set[int]] = field(default_factory=dict)
    """By number of the step: the ranks that have loaded all that it needs."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The epoch that a worker's hook has begun in the shard's namespace."""
    received: list[str] = field(default_factory=list)
    """Attempts whose prompt is in the KV cache of rank 0, and not yet in that of the other ranks."""
    nics: dict[int, list[Nic]] = field(default_factory=dict)
    """By shard: the counters of its compute NIC, if they have changed since the last report."""

    def merge(self, other: Report) -> Report:
        return Report(
            _union(self.loaded, other.loaded),
            self.reads + other.reads,
            _union(self.ended, other.ended),
            {n: self.taken.get(n, set()) | other.taken.get(n, set()) for n in {**self.taken, **other.taken}},
            {**self.epochs, **other.epochs},
            self.received + other.received,
            {**self.nics, **other.nics},
        )


def _union(a: dict[str, dict[int, _T]], b: dict[str, dict[int, _T]]) -> dict[str, dict[int, _T]]:
    return {name: {**a.get(name, {}), **b.get(name, {})} for name in {**a, **b}}


def read_options(extra_config: dict[str, Any]) -> Options:
    """Return the options in ``kv_connector_extra_config``. Raise InvalidError for the first invalid one."""
    where = "kv_connector_extra_config of PenstockDualPath"
    options = _adapter.options(Options, extra_config, where=where)
    for name in ("planner", "engine"):
        if not getattr(options, name):
            raise errors.InvalidError(f"{where}: no option {name!r}, and no variable PENSTOCK_{name.upper()}")
    if not options.buffer_mib:
        raise errors.InvalidError(f"{where}: option 'buffer_mib': 0; want at least 1")
    if not options.request_timeout > 0:
        raise errors.InvalidError(f"{where}: option 'request_timeout': {options.request_timeout:g}; want more than 0 seconds")
    try:
        verify_number(options.verify)
    except errors.InvalidError as e:
        raise errors.InvalidError(f"{where}: option {e}") from e
    return options
