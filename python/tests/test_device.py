"""Values and traffic managers in device memory, over the CUDA driver of the tests (rdma/copier/copiertest)."""

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


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests' driver the CUDA driver of scripts."""
    compiler = shutil.which("cc")
    assert compiler, "no C compiler (cc) in PATH"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", tmp_path / "libcuda.so.1", DRIVER], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@pytest.mark.usefixtures("driver")
def test_two_turns_on_a_device(run: Run) -> None:
    """Computed and cached KV passes through host memory, and no other part of the library touches the device."""
    assert run(SCRIPT) == "6\n"


DEVICE = """
import ctypes, os
from types import SimpleNamespace
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
driver = ctypes.CDLL("libcuda.so.1")
driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
driver.fakeGate.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

class Device:
    # The same pages twice: at address the driver copies, and no CPU may touch them; memory is for the script.
    def __init__(self, size):
        fd = os.memfd_create("device")
        os.ftruncate(fd, size)
        self.address, self.size = libc.mmap(None, size, 0, 1, fd, 0), size
        self.memory = (ctypes.c_char * size).from_address(libc.mmap(None, size, 3, 1, fd, 0))
        os.environ["FAKE_CUDA_DEVICE"] = ",".join(filter(None, [os.environ.get("FAKE_CUDA_DEVICE"), f"{self.address:x}:{size:x}"]))

class Stream:
    # A stream of the engine, which computes bytes by copying them.
    def __init__(self):
        self.handle, self.gate = ctypes.c_void_p(), ctypes.c_int()
        driver.cuCtxPushCurrent_v2(ctypes.byref(self.gate))
        assert driver.cuStreamCreate(ctypes.byref(self.handle), 0) == 0
    def close_gate(self):
        self.gate.value = 0
        driver.fakeGate(self.handle, ctypes.addressof(self.gate))
    def open_gate(self):
        driver.fakeOpen(ctypes.byref(self.gate))
    def copy(self, to, source, n):
        assert driver.cuMemcpyAsync(to, source, n, self.handle) == 0
"""

VALUES = """
class Tensor:
    device = SimpleNamespace(type="cuda", index=0)
    def __init__(self, address, size): self.address, self.size = address, size
    def data_ptr(self): return self.address
    def numel(self): return self.size
    def element_size(self): return 1
    def is_contiguous(self): return True

store = penstock.Store(NODE)
ns = store.namespace("values", block_tokens=4, layers=2, token_bytes=64, flat=True)
n = ns.value_bytes
device, computed, stream = Device(1 << 16), Device(1 << 16), Stream()
def page(i): return Tensor(device.address + i * n, n)
def refused(error, match, call):
    try:
        call()
    except error as e:
        assert match in str(e), e
    else:
        raise AssertionError(match)
refused(penstock.UnregisteredError, "not registered", lambda: ns.put(["a"], [page(0)], stream=0))
store.register(Tensor(device.address, device.size), staging_bytes=1 << 25)
refused(penstock.InvalidError, "torch is not imported", lambda: ns.put(["a"], [page(0)]))
refused(penstock.InvalidError, "for values on a CUDA device", lambda: ns.put(["a"], [bytes(n)], stream=0))
other = Tensor(device.address, n)
other.device = SimpleNamespace(type="cuda", index=1)
for mixed in ([page(0), bytearray(n)], [bytes(n), page(0)], [page(0), bytes(n)], [other, page(0)]):
    refused(penstock.InvalidError, "all in one place", lambda: ns.put(["a", "b"], mixed, stream=0))

computed.memory[:n] = bytes(i % 251 for i in range(n))
stream.close_gate()
stream.copy(device.address, computed.address, n)
job = ns.jobs.put(["a"], [page(0)], stream=stream.handle.value)  # does not wait for the stream
stream.open_gate()
assert job.wait().ok == 1
assert ns.get(["a"], [page(1)], stream=0).ok == 1
assert device.memory[n : 2 * n] == computed.memory[:n]
into = bytearray(n)
assert ns.get(["a"], [into]).ok == 1 and into == computed.memory[:n]  # with memory of the host, the same bytes
store.close()
print("end")
"""


@pytest.mark.usefixtures("driver")
def test_values_on_a_device(run: Run) -> None:
    """A put from a device stores the bytes that the engine's stream computes, and a get brings them back."""
    assert run(DEVICE + VALUES) == "end\n"


WORKER = """
import penstock._store
from penstock import Group, GroupKind, _adapter
from penstock.vllm._layout import Layer, LayerGroup, Layout
from penstock.vllm._plan import Load, Options, Plan, Save
from penstock.vllm import _worker
LAYERS, BLOCKS, PAGE, TOKENS = 3, 32, 4096, 4
device, computed, stream = Device(LAYERS * BLOCKS * PAGE), Device(LAYERS * BLOCKS * PAGE), Stream()
penstock._store.current_stream = lambda number: stream.handle.value
layers = [Layer(f"model.layers.{i}", device.address + i * BLOCKS * PAGE, PAGE, PAGE, 0) for i in range(LAYERS)]
layout = Layout([LayerGroup(0, layers)], 1, BLOCKS, TOKENS, [(device.address, device.size, device)],
                {"layers": [[layer.name, 0, [PAGE], [1], "torch.uint8"] for layer in layers], "specs": ["FullAttentionSpec"]}, 0)
_worker.read_layout = lambda tensors, config: layout
def at(layer, block): return slice((layer * BLOCKS + block) * PAGE, (layer * BLOCKS + block + 1) * PAGE)

for load in ("async", "layers"):
    limits = {"connect_timeout": 60, "load_timeout": 60, "save_timeout": 60}
    worker = _worker.Worker(Options(servers=NODE, load=load, layers_per_read=2, namespace=load, **limits), _adapter.Counters(load))
    worker.register({}, None, {"model": "m"}, 0, 1)
    epoch = worker._link.value.ns.epoch
    ids = bytes(range(1, 1 + 5 * _adapter.Chain.SIZE))
    blocks = [7, 3, 9, 1, 20]
    # The engine has put the computation of the blocks into its stream, and has not waited for it.
    computed.memory[:] = bytes((i * 13 + i // PAGE + len(load)) % 251 for i in range(len(computed.memory)))
    stream.close_gate()
    stream.copy(device.address, computed.address, device.size)
    worker.save(Plan(saves=[Save(1, ids, 0, [blocks])], epochs=[epoch]))
    stream.open_gate()
    while (report := worker.take_report()) is None:
        worker.poll()
    assert report.saves == {1: (1, 5)}, report
    ctypes.memset(device.memory, 0, device.size)
    other = [2, 4, 6, 8, 10]
    worker.load(Plan(loads=[Load(2, "r", ids, 0, [other])], epochs=[epoch]))
    if load == "layers":
        for layer in range(LAYERS):
            worker.wait_for_layer(f"model.layers.{layer}")
            for there, here in zip(blocks, other):
                assert device.memory[at(layer, here)] == computed.memory[at(layer, there)], (layer, here)
        worker.end_loads()
        assert worker.take_report().loads == {2: 1}
    else:
        while not (loaded := worker.take_loaded())[0]:
            worker.poll()
        assert loaded == ({"r"}, set()), loaded
    assert worker.take_failed() == set()
    for layer in range(LAYERS):
        for there, here in zip(blocks, other):
            assert device.memory[at(layer, here)] == computed.memory[at(layer, there)], (layer, here)
    worker.close()
print("end")
"""


@pytest.mark.usefixtures("driver")
def test_the_connector_for_vllm_on_a_device(run: Run) -> None:
    """The connector's worker saves blocks that the engine's stream has still to compute, and loads them, whole and by layers."""
    assert run(DEVICE + WORKER) == "end\n"


DUALPATH = """
import threading
import penstock._traffic
from penstock import _adapter, errors
from penstock._cluster import Part, Role
from penstock.vllm import _pd_worker
from penstock.vllm._layout import LATENT, Layer, LayerGroup, Layout
from penstock.vllm._pd_plan import Append, Job, Options, Plan, Step
PIECES = 1  # fragments of each of the model's three layers
LAYERS, BLOCKS, PAGE, TOKENS, SIZE = 3 * PIECES, 32, 4096, 4, _adapter.Chain.SIZE
# The engine's stream while it begins a step, and while it computes: torch's current stream may change.
begins, computes = Stream(), Stream()
now = begins
penstock._traffic.current_stream = lambda number: now.handle.value
def at(layer, block): return slice((layer * BLOCKS + block) * PAGE, (layer * BLOCKS + block + 1) * PAGE)
source = Device(LAYERS * BLOCKS * PAGE)
source.memory[:] = bytes((i * 13 + i // PAGE) % 251 for i in range(source.size))
config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(num_kv_heads=1))])

class Side:
    def __init__(self, role):
        self.device = device = Device(source.size)
        bases = [device.address + i * BLOCKS * PAGE for i in range(LAYERS)]
        self.layers = [Layer(f"model.layers.{i // PIECES}", base, PAGE, PAGE, 0, i % PIECES) for i, base in enumerate(bases)]
        self.layout = self.of("FullAttentionSpec")
        limits = {name: 60 for name in ("connect_timeout", "job_timeout", "layer_timeout", "append_timeout")}
        o = Options(servers=NODE, planner="p:1", engine=role.name, namespace=f"dual{PIECES}", buffer_mib=8, **limits)
        self.worker = _pd_worker.Worker(o, _adapter.Counters(role.name), role=role, broadcast=None)
        _pd_worker.read_layout = lambda tensors, config, windows: self.layout
        self.worker.register({}, config, {}, {"model": "m"}, 0, 1)
    def of(self, spec):
        facts = {"layers": [[layer.name, 0, [1, PAGE], [PAGE, 1], "torch.uint8"] for layer in self.layers], "specs": [spec]}
        group = LayerGroup(0, self.layers, fragments=PIECES)
        return Layout([group], 1, BLOCKS, TOKENS, [(self.device.address, self.device.size, self.device)], facts, 0)
    def compute(self, layer, page, block):
        computes.copy(self.device.address + at(layer, page).start, source.address + at(layer, block).start, PAGE)
    def check(self, layer, page, block):
        assert self.device.memory[at(layer, page)] == source.memory[at(layer, block)], (layer, page, block)
    def until(self, done):
        while True:
            self.worker.poll()
            report = self.worker.take_report()
            if report is not None and done(report):
                return report

def begin(side, **plan):
    global now
    now = begins
    side.worker.begin(Plan(**plan))
    now = computes

def held(call, *arguments):
    # The call waits for the stream, whose gate is closed.
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    return thread

prefill, decode = Side(Role.PREFILL), Side(Role.DECODE)
try:
    _pd_worker.Worker(prefill.worker._options, _adapter.Counters("l"), role=Role.PREFILL, broadcast=None).open(prefill.of(LATENT), {}, 0, 2)
except errors.InvalidError as e:
    assert "latent" in str(e), e
else:
    raise AssertionError("latent KV on a device, with two ranks")
member = prefill.worker.definitions[0].member
epoch = prefill.worker.definitions[0].epoch
ids = bytes(range(1, 1 + 6 * SIZE))

def run(name, blocks, hit, mine, theirs, pages, there):
    begin(decode, jobs=[Job(name, name, ids[: blocks * SIZE], epoch, blocks, hit, theirs, ((member.address, member.token),), tuple(there))])
    begin(prefill, jobs=[Job(name, name, ids[: blocks * SIZE], epoch, blocks, hit, mine, ())])
    prefill.until(lambda report: name in report.loaded)
    begins.close_gate()  # the step before this one is not at its end
    begin(prefill, steps=[Step(1, name, True, hit, tuple(pages), blocks)])
    waits = held(prefill.worker.wait_for_layer, "model.layers.0") if hit else None
    begins.open_gate()
    if waits:
        waits.join()
    computes.close_gate()
    for layer in range(3):
        prefill.worker.wait_for_layer(f"model.layers.{layer}")
        for piece in range(layer * PIECES, (layer + 1) * PIECES):
            for block in range(hit):
                prefill.check(piece, pages[block], block)
            for block in range(hit, blocks):
                prefill.compute(piece, pages[block], block)
        prefill.worker.save_layer(f"model.layers.{layer}")
    prefill.worker.end()
    prefill.worker.poll()
    report = prefill.worker.take_report()
    assert report is None or report == type(report)(reads=report.reads, nics=report.nics), report  # the progress of a read may come later
    computes.open_gate()
    assert prefill.until(lambda report: report.ended).ended[name][0].failure == ""
    while not (loaded := decode.worker.take_loaded()):
        decode.worker.poll()
    assert loaded == {name} and not prefill.worker.take_failed() and not decode.worker.take_failed()
    for layer in range(LAYERS):
        for block in range(blocks):
            decode.check(layer, there[block], block)

run("one", 4, 0, (), (), [7, 3, 9, 1], [5, 6, 2, 8])
decode.until(lambda report: report.ended)
begin(decode, appends=[Append("one", ids[: 5 * SIZE], epoch, (20,))])
computes.close_gate()
for layer in range(LAYERS):
    decode.compute(layer, 20, 4)
ends = held(decode.worker.end)
computes.open_gate()
ends.join()
decode.worker._link.value.shards[0].traffic.settle(ids[4 * SIZE : 5 * SIZE], timeout=60)
for side in (prefill, decode):
    ctypes.memset(side.device.memory, 0, side.device.size)
run("two", 6, 5, (Part(0, 2),), (Part(2, 5),), [10, 11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 26])
prefill.worker.close()
decode.worker.close()
print("end")
"""


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("pieces", [1, 3])
def test_dualpath_for_vllm_on_a_device(run: Run, pieces: int) -> None:
    """Two workers move KV that the streams have still to compute, and no copy writes to blocks that a stream still uses.

    With several pieces more of one layer wait than the staging memory has room for.
    """
    assert run(DEVICE + DUALPATH.replace("PIECES = 1", f"PIECES = {pieces}")) == "end\n"


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
    refused(Pointers([4096], [1 << 20], cuda=97), "CUDA driver|GPU 97")
    with pytest.raises(InvalidError, match=r"CUDA driver|GPU 97"):
        ns._store.register_address(4096, 1 << 20, cuda=97)
