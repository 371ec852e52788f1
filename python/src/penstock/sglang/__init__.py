"""SGLang's HiCache on Penstock: a storage backend (L3) for ``--hicache-storage-backend dynamic``.

    sglang serve --enable-hierarchical-cache --hicache-mem-layout page_first \\
      --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "penstock", "module_path": "penstock.sglang", "class_name": "PenstockHiCache",
        "interface_v1": 1, "servers": "127.0.0.1:7420"}'

SGLang imports this package in each scheduler process. ``docs/engines.md`` has the options.

    device pool ──► host pool (L2) ──► Pool: addresses of a page's fragments ──► Namespace ──► nodes
                       SGLang's            one for each host pool                one for each Pool
"""

from penstock.sglang._hicache import Options, PenstockHiCache

__all__ = ["Options", "PenstockHiCache"]
