"""The declarations of penstock.h in ctypes, and the loading of libpenstock.

The first Store loads the library. An import does not, because the children that a process forks after loading the library
cannot use it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from penstock import errors

ABI_MAJOR = 1

# Return codes.
OK, ERR_INVALID, ERR_CLOSED, ERR_FORKED = 0, 1, 2, 3
ERR_NOT_FOUND, ERR_TIMEOUT, ERR_CANCELED = 6, 9, 10

CHAINED, FLAT = 1, 2
KEYS_ANY, KEYS_IDS = 0, 1
GROUP_FULL, GROUP_WINDOW, GROUP_STATE = 1, 2, 3
ANY_MEMORY, NEWEST, MIX, ON_STREAM = 1, 2, 4, 8
OP_MATCH, OP_GET, OP_PUT, OP_EXISTS, OP_TOUCH, OP_DELETE = 1, 2, 3, 4, 5, 6


class CError(Structure):
    """penstock_error."""

    _fields_ = [("code", c_int32), ("message", c_char * 508)]


LogCallback = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)


class COptions(Structure):
    """penstock_options."""

    _fields_ = [
        ("size", c_uint64),
        ("servers", c_char_p),
        ("token", c_char_p),
        ("token_file", c_char_p),
        ("ca_file", c_char_p),
        ("cert_file", c_char_p),
        ("key_file", c_char_p),
        ("log", LogCallback),
        ("log_arg", c_void_p),
        ("log_level", c_int32),
        ("insecure", c_uint32),
        ("dial_timeout_ms", c_uint32),
        ("dead_for_ms", c_uint32),
        ("timeout_ms", c_uint32),
        ("jobs_max", c_uint32),
        ("jobs_parallel", c_uint32),
        ("connections", c_uint32),
        ("discover", c_uint32),
        ("reserved", c_uint32),
        ("zone", c_char_p),
    ]


class CGroup(Structure):
    """penstock_group."""

    _fields_ = [("kind", c_uint32), ("layers", c_uint32), ("token_bytes", c_uint32), ("window_tokens", c_uint32)]


class CDefinition(Structure):
    """penstock_definition."""

    _fields_ = [
        ("size", c_uint64),
        ("name", c_char_p),
        ("tenant", c_char_p),
        ("salt", c_void_p),
        ("salt_bytes", c_uint32),
        ("index", c_uint32),
        ("dtype", c_char_p),
        ("layout", c_char_p),
        ("block_tokens", c_uint32),
        ("n_groups", c_uint32),
        ("groups", POINTER(CGroup)),
        ("quota_bytes", c_int64),
        ("keys", c_uint32),
        ("reserved", c_uint32),
    ]


class CBatch(Structure):
    """penstock_batch. Its arrays are addresses of array.array objects, whose memory moves only when they are resized."""

    _fields_ = [
        ("size", c_uint64),
        ("epoch", c_uint64),
        ("flags", c_uint32),
        ("timeout_ms", c_uint32),
        ("lease_ms", c_uint32),
        ("n_keys", c_uint32),
        ("keys", c_char_p),  # packed, with their lengths in key_offsets
        ("key_offsets", c_void_p),
        ("first", c_uint32),
        ("n_pieces", c_uint32),
        ("piece_keys", c_void_p),
        ("piece_groups", c_void_p),
        ("piece_fragments", c_void_p),
        ("addresses", c_void_p),
        ("lengths", c_void_p),
        ("oldest_epoch", c_uint64),
        ("key_epochs", c_void_p),
        ("first_layer", c_uint32),
        ("layers", c_uint32),
        ("stream", c_uint64),
    ]


class CDeviceOptions(Structure):
    """penstock_device_options."""

    _fields_ = [("size", c_uint64), ("staging_bytes", c_uint64), ("device", c_uint32), ("reserved", c_uint32)]


class CResult(Structure):
    """penstock_result."""

    _fields_ = [
        ("job", c_uint64),
        ("op", c_uint32),
        ("n", c_uint32),
        ("ok", c_uint32),
        ("prefix", c_uint32),
        ("cut", c_uint32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("epoch", c_uint64),
        ("lease", c_uint64),
        ("error", CError),
    ]


class CPlanner(Structure):
    """penstock_planner."""

    _fields_ = [
        ("size", c_uint64),
        ("address", c_char_p),
        ("token", c_char_p),
        ("token_file", c_char_p),
        ("ca_file", c_char_p),
        ("cert_file", c_char_p),
        ("key_file", c_char_p),
        ("insecure", c_uint32),
        ("reserved", c_uint32),
    ]


class CMember(Structure):
    """penstock_member."""

    _fields_ = [
        ("size", c_uint64),
        ("name", c_char_p),
        ("address", c_char_p),
        ("token", c_char_p),
        ("address_bytes", c_uint32),
        ("token_bytes", c_uint32),
        ("device_blocks", c_uint32),
        ("prompt_blocks", c_uint32),
        ("buffer_bytes", c_uint64),
        ("block_bytes", c_uint64),
        ("sums_bytes", c_uint64),
        ("request_bytes", c_uint64),
        ("prefix_cache_blocks", c_uint32),
        ("reserved", c_uint32),
    ]


class CNic(Structure):
    """penstock_nic."""

    _fields_ = [("name", c_char * 256), ("bytes_out", c_uint64), ("bytes_in", c_uint64)]


class CLeaderOptions(Structure):
    """penstock_leader_options."""

    _fields_ = [
        ("size", c_uint64),
        ("planner", POINTER(CPlanner)),
        ("group", c_char_p),
        ("node", c_char_p),
        ("members", POINTER(CMember)),
        ("n_members", c_uint32),
        ("role", c_uint32),
        ("read_rate", c_uint64),
        ("fetch_every_ms", c_uint32),
        ("reserved", c_uint32),
    ]


class CPart(Structure):
    """penstock_part."""

    _fields_ = [("from", c_uint32), ("to", c_uint32)]


class CAction(Structure):
    """penstock_action."""

    _fields_ = [("attempt", c_uint64), ("kind", c_uint32), ("part", CPart), ("reserved", c_uint32), ("start_bytes", c_uint64)]


class CStart(Structure):
    """penstock_start."""

    _fields_ = [
        ("size", c_uint64),
        ("name", c_char_p),
        ("id", c_char_p),
        ("ns", c_char_p),
        ("engine", c_char_p),
        ("peer_engine", c_char_p),
        ("peer_address", c_void_p),
        ("peer_token", c_void_p),
        ("peer_address_bytes", c_uint32),
        ("peer_token_bytes", c_uint32),
        ("epoch", c_uint64),
        ("prompt_tokens", c_uint32),
        ("output_tokens", c_uint32),
        ("hit_blocks", c_uint32),
        ("n_parts", c_uint32),
        ("parts", POINTER(CPart)),
        ("payload", c_void_p),
        ("ids", c_void_p),
        ("extra", c_char_p),
        ("payload_bytes", c_uint64),
        ("n_ids", c_uint32),
        ("reserved", c_uint32),
    ]


class CGatewayOptions(Structure):
    """penstock_gateway_options."""

    _fields_ = [
        ("size", c_uint64),
        ("planner", POINTER(CPlanner)),
        ("epoch", c_uint64),
        ("requests_max", c_uint32),
        ("reserved", c_uint32),
    ]


class CResident(Structure):
    """penstock_resident."""

    _fields_ = [("engine", c_char_p), ("tokens", c_uint32), ("reserved", c_uint32)]


class CPrompt(Structure):
    """penstock_prompt."""

    _fields_ = [
        ("size", c_uint64),
        ("id", c_char_p),
        ("tokens", c_void_p),
        ("ids", c_char_p),
        ("extra", c_char_p),
        ("resident", POINTER(CResident)),
        ("n_tokens", c_uint32),
        ("n_ids", c_uint32),
        ("prompt_tokens", c_uint32),
        ("output_tokens", c_uint32),
        ("deadline_ms", c_uint32),
        ("n_resident", c_uint32),
    ]


class CEvent(Structure):
    """penstock_event."""

    _fields_ = [
        ("request", c_uint64),
        ("kind", c_uint32),
        ("hit_tokens", c_uint32),
        ("epoch", c_uint64),
        ("read_by_prefill", c_uint32),
        ("read_by_decode", c_uint32),
        ("prefill", c_char * 264),
        ("decode", c_char * 264),
        ("error", CError),
    ]


class CTrafficOptions(Structure):
    """penstock_traffic_options."""

    _fields_ = [
        ("size", c_uint64),
        ("listen", c_char_p),
        ("advertise", c_char_p),
        ("token", c_char_p),
        ("memory", c_void_p),
        ("memory_bytes", c_uint64),
        ("bases", c_void_p),
        ("stride", c_uint64),
        ("buffer_bytes", c_uint64),
        ("append_bytes", c_uint64),
        ("token_bytes", c_uint32),
        ("n_bases", c_uint32),
        ("pages", c_uint32),
        ("persist_max", c_uint32),
        ("transfers_max", c_uint32),
        ("connections", c_uint32),
        ("cuda", c_uint32),
        ("verify", c_uint32),
        ("ca_file", c_char_p),
        ("cert_file", c_char_p),
        ("key_file", c_char_p),
        ("order", c_void_p),
        ("n_order", c_uint32),
        ("tables", c_void_p),
        ("n_tables", c_uint32),
    ]


class CTrafficDescription(Structure):
    """penstock_traffic_description."""

    _fields_ = [
        ("size", c_uint64),
        ("address", c_char * 256),
        ("token", c_uint8 * 256),
        ("address_bytes", c_uint32),
        ("token_bytes", c_uint32),
        ("buffer_bytes", c_uint64),
        ("block_bytes", c_uint64),
        ("sums_bytes", c_uint64),
        ("request_bytes", c_uint64),
    ]


class CTransferOptions(Structure):
    """penstock_transfer_options."""

    _fields_ = [
        ("size", c_uint64),
        ("request", c_char_p),
        ("ids", c_char_p),
        ("parts", POINTER(CPart)),
        ("pages", c_void_p),
        ("peer_address", c_char_p),
        ("peer_token", c_char_p),
        ("epoch", c_uint64),
        ("peer_address_bytes", c_uint32),
        ("peer_token_bytes", c_uint32),
        ("n_ids", c_uint32),
        ("n_parts", c_uint32),
        ("n_pages", c_uint32),
        ("blocks", c_uint32),
        ("hit_blocks", c_uint32),
        ("timeout_ms", c_uint32),
        ("no_persist", c_uint32),
        ("resident_blocks", c_uint32),
    ]


class CTransferEvent(Structure):
    """penstock_transfer_event."""

    _fields_ = [
        ("transfer", c_uint64),
        ("kind", c_uint32),
        ("first_miss", c_uint32),
        ("part", CPart),
        ("upto", c_uint32),
        ("gone", c_uint32),
        ("bytes", c_uint64),
        ("intact", c_uint32),
        ("reserved", c_uint32),
        ("error", CError),
    ]


# The argument types of the functions that the package calls. Each of these functions returns a code.
PROTOTYPES: dict[str, list[Any]] = {
    "penstock_open": [POINTER(COptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_close": [c_uint64, POINTER(CError)],
    "penstock_ensure": [c_uint64, POINTER(CDefinition), POINTER(c_uint64), POINTER(CError)],
    "penstock_epoch": [c_uint64, c_uint32, POINTER(c_uint64), POINTER(CError)],
    "penstock_bump_keep": [c_uint64, c_uint64, c_uint32, POINTER(c_uint64), POINTER(CError)],
    "penstock_pin_epoch": [c_uint64, c_uint64, c_uint32, POINTER(c_uint64), POINTER(c_uint64), POINTER(CError)],
    "penstock_retire": [c_uint64, c_uint64, c_uint32, POINTER(CError)],
    "penstock_register": [c_uint64, c_void_p, c_uint64, POINTER(c_uint64), POINTER(CError)],
    "penstock_register_device": [c_uint64, POINTER(CDeviceOptions), c_uint64, c_uint64, POINTER(c_uint64), POINTER(CError)],
    "penstock_copy_device": [c_uint32, c_uint64, c_void_p, c_uint64, c_uint32, POINTER(CError)],
    "penstock_unregister": [c_uint64, POINTER(CError)],
    "penstock_submit": [c_uint64, c_uint32, POINTER(CBatch), c_void_p, POINTER(c_uint64), POINTER(CError)],
    "penstock_submit_wait": [c_uint64, c_uint32, POINTER(CBatch), c_void_p, c_uint32, POINTER(c_uint64), POINTER(CResult), POINTER(CError)],
    "penstock_cancel": [c_uint64, c_uint64, POINTER(CError)],
    "penstock_eventfd": [c_uint64, POINTER(c_int32), POINTER(CError)],
    "penstock_drain": [c_uint64, POINTER(CResult), c_uint32, POINTER(c_uint32), POINTER(CError)],
    "penstock_wait": [c_uint64, c_uint64, c_uint32, POINTER(CResult), POINTER(CError)],
    "penstock_lease_renew": [c_uint64, c_uint32, POINTER(CError)],
    "penstock_lease_release": [c_uint64, POINTER(CError)],
    "penstock_key_ids": [c_uint64, c_char_p, c_void_p, c_uint32, c_void_p, POINTER(CError)],
    "penstock_chain": [c_uint64, c_char_p, c_char_p, c_uint32, c_void_p, c_uint32, c_void_p, POINTER(c_uint32), POINTER(CError)],
    "penstock_leader_open": [c_uint64, POINTER(CLeaderOptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_leader_close": [c_uint64, POINTER(CError)],
    "penstock_leader_add": [c_uint64, POINTER(CMember), POINTER(CError)],
    "penstock_leader_remove": [c_uint64, c_char_p, POINTER(CError)],
    "penstock_leader_report_nics": [c_uint64, c_char_p, POINTER(CNic), c_uint32, POINTER(CError)],
    "penstock_leader_eventfd": [c_uint64, POINTER(c_int32), POINTER(CError)],
    "penstock_leader_drain": [c_uint64, POINTER(CAction), c_uint32, POINTER(c_uint32), POINTER(CError)],
    "penstock_attempt_describe": [c_uint64, POINTER(CStart), c_uint64, POINTER(c_uint64), POINTER(CError)],
    "penstock_attempt_progress": [c_uint64, CPart, c_uint32, c_uint64, POINTER(CError)],
    "penstock_attempt_stopped": [c_uint64, CPart, c_uint32, c_uint32, POINTER(CError)],
    "penstock_attempt_passed": [c_uint64, POINTER(CError)],
    "penstock_attempt_done": [c_uint64, c_char_p, c_uint32, POINTER(CError)],
    "penstock_gateway_open": [c_uint64, POINTER(CGatewayOptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_gateway_close": [c_uint64, POINTER(CError)],
    "penstock_gateway_submit": [c_uint64, POINTER(CPrompt), POINTER(c_uint64), POINTER(CError)],
    "penstock_request_cancel": [c_uint64, POINTER(CError)],
    "penstock_gateway_eventfd": [c_uint64, POINTER(c_int32), POINTER(CError)],
    "penstock_gateway_drain": [c_uint64, POINTER(CEvent), c_uint32, POINTER(c_uint32), POINTER(CError)],
    "penstock_traffic_open": [c_uint64, POINTER(CTrafficOptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_traffic_close": [c_uint64, POINTER(CError)],
    "penstock_traffic_follow": [c_uint64, c_uint64, POINTER(CError)],
    "penstock_traffic_describe": [c_uint64, POINTER(CTrafficDescription), POINTER(CError)],
    "penstock_traffic_prefill": [c_uint64, POINTER(CTransferOptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_traffic_decode": [c_uint64, POINTER(CTransferOptions), POINTER(c_uint64), POINTER(CError)],
    "penstock_transfer_read": [c_uint64, CPart, POINTER(CError)],
    "penstock_transfer_cut": [c_uint64, POINTER(CError)],
    "penstock_transfer_recompute": [c_uint64, CPart, POINTER(CError)],
    "penstock_transfer_add_pages": [c_uint64, c_void_p, c_uint32, POINTER(CError)],
    "penstock_transfer_computed": [c_uint64, c_uint32, c_uint32, POINTER(CError)],
    "penstock_transfer_layer": [c_uint64, c_uint32, c_uint32, POINTER(CError)],
    "penstock_transfer_finish": [c_uint64, POINTER(CError)],
    "penstock_transfer_cancel": [c_uint64, POINTER(CError)],
    "penstock_traffic_append_pages": [
        c_uint64, c_char_p, c_char_p, c_uint32, c_uint64, c_void_p, c_uint32, c_uint32, POINTER(CError),
    ],
    "penstock_traffic_settle": [c_uint64, c_char_p, c_uint32, POINTER(CError)],
    "penstock_traffic_nics": [c_uint64, POINTER(CNic), c_uint32, POINTER(c_uint32), POINTER(CError)],
    "penstock_traffic_eventfd": [c_uint64, POINTER(c_int32), POINTER(CError)],
    "penstock_traffic_drain": [c_uint64, POINTER(CTransferEvent), c_uint32, POINTER(c_uint32), POINTER(CError)],
    "penstock_stats": [c_uint64, c_void_p, c_uint64, POINTER(c_uint64), POINTER(CError)],
}  # fmt: skip


class _Loaded:
    """The library of this process, and the process that loaded it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lib: ctypes.CDLL | None = None
        self.pid = 0


_loaded = _Loaded()
# A thread of the parent may have held the lock during the fork.
os.register_at_fork(after_in_child=lambda: setattr(_loaded, "lock", threading.Lock()))


def library_path() -> Path:
    """Return the path of the bundled library, even if the file does not exist."""
    return Path(__file__).parent / "_bundled" / "libpenstock.so"


def check_process(pid: int) -> None:
    """Raise ForkedError unless this process is pid, the process that loaded the library."""
    if os.getpid() != pid:
        raise errors.ForkedError(
            f"process {os.getpid()} was forked from process {pid}, which had opened a penstock.Store. The library's"
            " threads do not exist in a forked child. Open the first Store after the fork, or start the process with"
            ' the "spawn" method'
        )


def load() -> ctypes.CDLL:
    """Return the library. The first call loads it."""
    with _loaded.lock:
        if _loaded.lib is not None:
            check_process(_loaded.pid)
            return _loaded.lib
        path = library_path()
        try:
            lib = ctypes.CDLL(str(path))
        except OSError as e:
            raise errors.Error(
                f"{path} cannot be loaded: {e}. The wheel contains this library, for Linux on x86-64 with glibc 2.28 or"
                " later; make wheel builds the wheel"
            ) from e
        lib.penstock_abi_version.restype = c_uint32
        lib.penstock_abi_version.argtypes = []
        version = lib.penstock_abi_version()
        if version >> 16 != ABI_MAJOR:
            raise errors.VersionError(
                f"{path} has version {version >> 16}.{version & 0xFFFF} of the C interface; this package needs {ABI_MAJOR}.x"
            )
        for name, arguments in PROTOTYPES.items():
            function = getattr(lib, name)
            function.restype = c_int32
            function.argtypes = arguments
        _loaded.lib, _loaded.pid = lib, os.getpid()
        return lib


def error_of(error: CError) -> errors.Error:
    """Return the exception for a penstock_error."""
    text = error.message.decode(errors="replace")
    kind = errors.BY_CODE.get(error.code)
    if kind is None:
        return errors.InternalError(f"error {error.code}: {text}")
    return kind(text)


def call(function: Any, *arguments: Any) -> None:
    """Call a function whose last argument is a penstock_error, and raise its error."""
    error = CError()
    code = function(*arguments, ctypes.byref(error))
    if code != OK:
        error.code = code
        raise error_of(error)
