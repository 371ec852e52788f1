"""Penstock, a storage tier for KV cache in LLM inference: the client.

``Store`` opens a connection, and ``Store.namespace`` opens the KV of one model, whose ``match``, ``get`` and ``put``
transfer blocks. ``Leader`` and ``Gateway`` are the sides of an engine and of a front end in a prefill/decode cluster, and
``Traffic`` moves the KV of an engine there. The first Store loads the library, so a process that imports this package may
fork before that.
"""

from __future__ import annotations

from penstock._cluster import Action, ActionKind, Attempt, Leader, Member, Nic, Part, Role
from penstock._core import (
    Cut,
    Group,
    GroupKind,
    Job,
    KeyResult,
    Lease,
    Match,
    Memory,
    Result,
)
from penstock._gateway import Event, EventKind, Gateway, Request
from penstock._keys import Key, Keys
from penstock._memory import Buffer, Pointers, Tensor, Value
from penstock._store import Calls, Namespace, Store
from penstock._traffic import DecodeJob, PrefillJob, Traffic, TransferEvent, TransferKind
from penstock.errors import (
    AuthError,
    BusyError,
    CanceledError,
    ClosedError,
    Error,
    ForkedError,
    InternalError,
    InvalidError,
    MismatchError,
    NotFoundError,
    ProviderError,
    RefusedError,
    TimedOutError,
    UnavailableError,
    UnregisteredError,
    VersionError,
)

__all__ = [
    "Action",
    "ActionKind",
    "Attempt",
    "AuthError",
    "Buffer",
    "BusyError",
    "Calls",
    "CanceledError",
    "ClosedError",
    "Cut",
    "DecodeJob",
    "Error",
    "Event",
    "EventKind",
    "ForkedError",
    "Gateway",
    "Group",
    "GroupKind",
    "InternalError",
    "InvalidError",
    "Job",
    "Key",
    "KeyResult",
    "Keys",
    "Leader",
    "Lease",
    "Match",
    "Member",
    "Memory",
    "MismatchError",
    "Namespace",
    "Nic",
    "NotFoundError",
    "Part",
    "Pointers",
    "PrefillJob",
    "ProviderError",
    "RefusedError",
    "Request",
    "Result",
    "Role",
    "Store",
    "Tensor",
    "TimedOutError",
    "Traffic",
    "TransferEvent",
    "TransferKind",
    "UnavailableError",
    "UnregisteredError",
    "Value",
    "VersionError",
]
