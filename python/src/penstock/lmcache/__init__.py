"""Penstock as an L2 of LMCache: the client class of its ``native_plugin`` adapter.

``lmcache server`` loads it by name; nothing of LMCache is imported here::

    lmcache server … --l2-adapter '{"type": "native_plugin", "module_path": "penstock.lmcache",
        "class_name": "PenstockL2", "adapter_params": {"servers": "127.0.0.1:7420"}}'
"""

from __future__ import annotations

from penstock.lmcache._l2 import PenstockL2

__all__ = ["PenstockL2"]
