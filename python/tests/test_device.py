"""Traffic managers of device memory, over the CUDA driver of the tests (rdma/copier/copiertest)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeNamespace, Run

from penstock import InvalidError, Pointers, Traffic

DRIVER = Path(__file__).parents[2] / "rdma" / "copier" / "copiertest" / "testdata" / "fakecuda.c"

SCRIPT = """
import ctypes, os
from penstock import Pointers, Traffic, TransferKind
PAGES, LAYERS = 16, 2
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
store = penstock.Store(NODE)
ns = store.namespace("device", block_tokens=16, layers=LAYERS, token_bytes=64, ids=True)
layer_bytes = ns.value_bytes // LAYERS

class Side:
    def __init__(self):
        # The same pages twice: where the driver copies, no CPU may touch them; the script uses the other address.
        size = ns.value_bytes * PAGES
        fd = os.memfd_create("device")
        os.ftruncate(fd, size)
        address = libc.mmap(None, size, 0, 1, fd, 0)
        seen = libc.mmap(None, size, 3, 1, fd, 0)
        self.memory = (ctypes.c_char * size).from_address(seen)
        os.environ["FAKE_CUDA_DEVICE"] = ",".join(filter(None, [os.environ.get("FAKE_CUDA_DEVICE"), f"{address:x}:{size:x}"]))
        bases = [layer * layer_bytes * PAGES for layer in range(LAYERS)]
        self.traffic = Traffic(ns, Pointers([address], [size]), bases, pages=PAGES, buffer_bytes=2 << 20, cuda=0)

    def span(self, layer, page):
        start = (layer * PAGES + page) * layer_bytes
        return slice(start, start + layer_bytes)

    def until(self, kind):
        while True:
            for event in self.traffic.wait(60):
                if event.kind == kind:
                    return event
                assert event.kind in (TransferKind.PROGRESS, TransferKind.LOADED, TransferKind.READY), event

def content(block, layer):
    return bytes((block * 31 + layer * 7 + i) % 251 for i in range(layer_bytes))

prefill, decode = Side(), Side()
ids = [ns.chain(list(range(16 * 6)))[i] for i in range(6)]
for hit, blocks in ((0, 4), (4, 6)):
    d = decode.traffic.decode("r", ids[:blocks], blocks=blocks, hit=hit, parts=[(1, hit)] if hit else [], pages=range(blocks),
                              peer_address=prefill.traffic.address, peer_token=prefill.traffic.token, timeout=60)
    p = prefill.traffic.prefill("r", ids[:blocks], blocks=blocks, hit=hit, parts=[(0, 1)] if hit else [], pages=range(blocks), timeout=60)
    for layer in range(LAYERS):
        p.layer(layer, timeout=60)
        for block in range(hit):
            assert prefill.memory[prefill.span(layer, block)] == content(block, layer), (block, layer)
        for block in range(hit, blocks):
            prefill.memory[prefill.span(layer, block)] = content(block, layer)
        p.computed(layer, blocks)
    p.finish()
    decode.until(TransferKind.READY)
    for block in range(blocks):
        for layer in range(LAYERS):
            assert decode.memory[decode.span(layer, block)] == content(block, layer), (block, layer)
    d.finish()
    prefill.until(TransferKind.FINISHED)
    decode.until(TransferKind.FINISHED)
    for side in (prefill, decode):
        ctypes.memset(side.memory, 0, len(side.memory))
print(ns.match(ids).prefix)
prefill.traffic.close(); decode.traffic.close(); store.close()
"""


def test_two_turns_on_a_device(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed and cached KV passes through host memory, and no other part of the library touches the device."""
    compiler = shutil.which("cc")
    assert compiler, "no C compiler (cc) in PATH"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", tmp_path / "libcuda.so.1", DRIVER], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert run(SCRIPT) == "6\n"


def test_bad_devices(make: MakeNamespace) -> None:
    ns = make(block_tokens=16, layers=2, ids=True)

    class Tensor:
        class device:
            type, index = "cuda", 98

        def data_ptr(self) -> int:
            return 4096

        def numel(self) -> int:
            return 1 << 20

        def element_size(self) -> int:
            return 1

        def is_contiguous(self) -> bool:
            return True

    def refused(memory: Any, match: str, **options: Any) -> None:
        with pytest.raises(InvalidError, match=match):
            Traffic(ns, memory, [0], buffer_bytes=1 << 20, **options)

    refused(Tensor(), "cuda=0", cuda=0)
    refused(bytearray(1 << 20), "bytearray with cuda=0", cuda=0)
    refused(Tensor(), "CUDA driver|GPU 98")
    refused(Pointers([4096], [1 << 20]), "CUDA driver|GPU 97", cuda=97)
