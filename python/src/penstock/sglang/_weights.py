"""Detects changes of the engine's weights, and their version."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

# The scheduler calls the first when it has loaded weights, before it sets their version, and the second before it flushes
# the tree of cached prefixes. A storage backend has no hook of its own for either.
HOOKS = ("record_weight_version_after_update", "flush_cache_after_weight_update")

_lock = threading.Lock()
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(listener: Any) -> bool:
    """Call ``listener.weights_updated()`` in the scheduler's thread when weights were loaded in this process.

    Returns False if this release of SGLang has no such method.
    """
    try:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater
    except ImportError:
        return False
    with _lock:
        if not all(callable(getattr(Updater, name, None)) for name in HOOKS):
            return False
        for name in HOOKS:
            method = getattr(Updater, name)
            if not hasattr(method, "__penstock__"):
                setattr(Updater, name, _notifying(method))
        _listeners.add(listener)
    return True


def ignore(listener: Any) -> None:
    """End watch."""
    with _lock:
        _listeners.discard(listener)


def _notifying(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def notify(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            listeners = list(_listeners)
        for listener in listeners:
            listener.weights_updated()
        return method(*args, **kwargs)

    notify.__penstock__ = True  # type: ignore[attr-defined]
    return notify


def version() -> str:
    """Return the version of the weights that the engine serves, as given by the caller of the last update."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, AttributeError, RuntimeError, ValueError):  # outside of an engine
        return ""
