"""The layout of a KV cache on a device that the CPU must not touch, over the CUDA driver of the tests (rdma/copier/copiertest)."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import InvalidError
from penstock.vllm import _layout

DRIVER = Path(__file__).parents[2] / "rdma" / "copier" / "copiertest" / "testdata" / "fakecuda.c"
BLOCKS, PAGE = 16, 4096
DEVICE = torch.device("cuda", 0)


class FullAttentionSpec:
    block_size = 16


class OnDevice:
    """A tensor whose data is at the address that only the driver may use. seen has the same pages, for the engine."""

    def __init__(self, address: int, seen: torch.Tensor) -> None:
        self.device, self._address, self._seen = DEVICE, address, seen

    def data_ptr(self) -> int:
        return self._address

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: BLOCKS * PAGE)

    def __getitem__(self, block: int) -> torch.Tensor:
        return self._seen[block]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._seen, name)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, torch.Tensor]:
    """Load the tests' driver as libcuda.so.1, and return device memory: its address, and the engine's view."""
    compiler = shutil.which("cc")
    assert compiler, "no C compiler (cc) in PATH"
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", library, DRIVER], check=True)
    ctypes.CDLL(str(library))
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fd = os.memfd_create("device")
    os.ftruncate(fd, BLOCKS * PAGE)
    address = libc.mmap(None, BLOCKS * PAGE, 0, mmap.MAP_SHARED, fd, 0)
    seen = torch.frombuffer(mmap.mmap(fd, BLOCKS * PAGE), dtype=torch.uint8).view(BLOCKS, PAGE)
    os.close(fd)
    monkeypatch.setenv("FAKE_CUDA_DEVICE", f"{address:x}:{BLOCKS * PAGE:x}")
    return address, seen


def test_the_addresses_are_checked_with_the_engines_tensors(memory: tuple[int, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    address, seen = memory
    seen.copy_(torch.arange(BLOCKS * PAGE).view(BLOCKS, PAGE) % 251)
    before = seen.clone()
    waited: list[int] = []
    monkeypatch.setattr(_layout, "wait_for_engine", waited.append)  # this torch has no CUDA
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a"])])
    layout = _layout.read_layout({"a": OnDevice(address, seen)}, config)
    assert layout.cuda == 0
    assert waited == [0]
    assert torch.equal(seen, before)
    _, values = layout.pieces(0, [[3]])
    assert values.cuda == 0
    assert list(values.addresses) == [address + 3 * PAGE]
    with pytest.raises(InvalidError, match="another layout"):
        _layout.read_layout({"a": OnDevice(address, seen.flip(0))}, config)
    assert torch.equal(seen, before)
