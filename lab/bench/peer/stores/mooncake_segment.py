"""The process whose memory is Mooncake's storage. It prints a line when the segment is mounted, and ends with its standard input."""

from __future__ import annotations

import json
import os
import sys

from mooncake.store import MooncakeDistributedStore

_LOCAL_BYTES = 64 << 20


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    options = json.loads(sys.argv[1])
    store = MooncakeDistributedStore()
    code = store.setup(options["address"], "P2PHANDSHAKE", options["segment_bytes"], _LOCAL_BYTES, "tcp", "", options["master"])
    if code:
        sys.exit(f"setup failed with code {code}")
    print(json.dumps({"client": "segment"}), file=answers, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
