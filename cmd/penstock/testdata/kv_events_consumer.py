"""Decodes what `penstock events --zmq` publishes with libzmq, msgspec and vLLM's own classes."""
import importlib.util, json, subprocess, sys, types, os, tempfile, socket, time
import msgspec, zmq

def stub(name, **attrs):
    m = types.ModuleType(name); m.__dict__.update(attrs); sys.modules[name] = m
import logging, typing
for n in ["vllm", "vllm.config", "vllm.utils", "vllm.v1", "vllm.v1.core"]:
    stub(n)
stub("vllm.config.kv_events", KVEventsConfig=object)
stub("vllm.logger", init_logger=logging.getLogger)
stub("vllm.utils.network_utils", get_ip=None, get_tcp_uri=None, is_valid_ipv6_address=None, split_zmq_path=None)
stub("vllm.v1.core.kv_cache_utils", ExternalBlockHash=typing.Union[bytes, int])
spec = importlib.util.spec_from_file_location("kv_events", sys.argv[1])
k = importlib.util.module_from_spec(spec); sys.modules["kv_events"] = k; spec.loader.exec_module(k)

pen = sys.argv[2]
d = tempfile.mkdtemp()
def port():
    s = socket.socket(); s.bind(("127.0.0.1", 0)); p = s.getsockname()[1]; s.close(); return p
listen = f"127.0.0.1:{port()}"
node = subprocess.Popen([pen, "serve", "--data", d + "/v", "--io", "posix", "--node", "n1", "--listen", listen, "--data-listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--capacity", "64MiB", "--arena", "32MiB", "--index-cache", "4MiB", "--free-floor", "1MiB", "--prewrite=false"], stderr=subprocess.DEVNULL)
def run(*a):
    return subprocess.run([pen, *a, "--server", listen], check=True, capture_output=True, text=True).stdout
run("status", "--wait")
run("ns", "create", "m", "--layers", "2", "--block-tokens", "4", "--token-bytes", "1024")
open(d + "/t", "w").write("\n".join(str(i) for i in range(12)) + "\n")
open(d + "/d", "wb").write(os.urandom(3 * 8192))
ctx = zmq.Context()
try:
    for hashes in ["bytes", "int"]:
        run("ns", "bump-epoch", "m")
        pub = subprocess.Popen([pen, "events", "--server", listen, "--format", "json", "--zmq", "tcp://127.0.0.1:0", "--zmq-replay", "tcp://127.0.0.1:0", "--zmq-form", "maps", "--zmq-hashes", hashes, "--zmq-resync", "0"], stdout=subprocess.PIPE, text=True)
        at = json.loads(pub.stdout.readline())
        sub = ctx.socket(zmq.SUB); sub.connect(at["endpoint"]); sub.subscribe(b"kv@"); sub.RCVTIMEO = 60000
        while json.loads(pub.stdout.readline())["what"] != "joined":
            pass
        run("block", "put", "m", "--tokens-file", d + "/t", "--data-file", d + "/d")
        ids = [b["id"] for b in json.loads(run("block", "list", "m", "--format", "json"))["blocks"] if b["group"] == 0]
        dec = msgspec.msgpack.Decoder(k.KVEventBatch); enc = msgspec.msgpack.Encoder()
        def recv():
            while True:
                topic, seq, payload = sub.recv_multipart()
                batch = dec.decode(payload)
                assert enc.encode(batch) == payload, "vLLM's encoder writes other bytes"
                assert topic == b"kv@n1/m@m" and batch.data_parallel_rank == 0
                if batch.events and not (isinstance(batch.events[0], k.AllBlocksCleared) and batch.events[0:] and recv.skip):
                    return int.from_bytes(seq, "big"), batch
        recv.skip = True
        seq, b = recv()
        e = b.events[0]
        want = [bytes.fromhex(i) if hashes == "bytes" else int(i[-16:], 16) for i in ids]
        assert isinstance(e, k.BlockStored) and sorted(e.block_hashes, key=str) == sorted(want, key=str), (e, want)
        assert e.block_size == 4 and e.token_ids == [] and e.medium == k.MEDIUM_STORAGE and e.parent_block_hash is None
        run("evict", "--bytes", "1B")
        _, b = recv(); assert isinstance(b.events[0], k.BlockRemoved) and b.events[0].medium == "STORAGE"
        recv.skip = False
        run("ns", "bump-epoch", "m")
        _, b = recv(); assert isinstance(b.events[0], k.AllBlocksCleared)
        r = ctx.socket(zmq.DEALER); r.connect(at["replay"]); r.RCVTIMEO = 60000
        r.send_multipart([b"", (0).to_bytes(8, "big")])
        n = 0
        while True:
            empty, topic, s, payload = r.recv_multipart()
            assert empty == b""
            if s == k.ZmqEventPublisher.END_SEQ:
                break
            assert int.from_bytes(s, "big") == n and topic == b"kv@n1/m@m"; dec.decode(payload); n += 1
        print(hashes, "ok:", n, "messages replayed")
        sub.close(0); r.close(0)
        pub.terminate(); print(pub.stdout.read().strip().splitlines()[-1], pub.wait())
finally:
    node.terminate(); node.wait()
