"""The decisions of the connector for vLLM, without vLLM. python/engines has the tests with the engine."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Group, GroupKind, InvalidError, Namespace, Store, _adapter, testing
from penstock.vllm import _layout
from penstock.vllm._extra import Adapters, Extras
from penstock.vllm._layout import Definition, Layer, LayerGroup, Layout
from penstock.vllm._plan import EVENTS, Load, Options, Plan, Report
from penstock.vllm._scheduler import Scheduler
from penstock.vllm._worker import Worker, _Open, open_namespace

BLOCK = 4
FULL = Group(GroupKind.FULL, 1, 8)
WINDOW = Group(GroupKind.WINDOW, 2, 8, 6)
STATE = Group(GroupKind.STATE, 2, BLOCK * FULL.token_bytes)
PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_has_all_options_and_events() -> None:
    page = PAGE.read_text()
    for name in [*(f.name for f in dataclasses.fields(Options)), *EVENTS]:
        assert f"`{name}`" in page, name


@dataclasses.dataclass
class Request:
    """The part of vLLM's Request that the connector uses."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_in_flight_tokens: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    prompt_embeds: Any = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Pool:
    """The part of vLLM's BlockPool that the connector uses: references to blocks."""

    num_gpu_blocks = 80
    null_block = SimpleNamespace(block_id=0)

    def __init__(self) -> None:
        self.blocks = list(range(self.num_gpu_blocks))
        self.references: Counter[int] = Counter()
        self.evicted: set[int] = set()

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted |= block_ids

    def touch(self, blocks: list[int]) -> None:
        self.references.update(blocks)

    def free_blocks(self, blocks: list[int]) -> None:
        self.references.subtract(blocks)
        assert min(self.references.values()) >= 0

    @property
    def kept(self) -> set[int]:
        return {block for block, n in self.references.items() if n}


class Engine:
    """A scheduler of the connector with a real node, and workers that store the blocks of all saves."""

    def __init__(
        self,
        node: testing.Node,
        name: str,
        ranks: int = 1,
        groups: tuple[Group, ...] = (FULL,),
        extras: Extras | None = None,
        **options: Any,
    ) -> None:
        options = {"lookup_timeout": 60, "connect_timeout": 60, **options}
        self.layout = layout_of(groups)
        states = tuple(self.layout.state_pools)
        self.definitions = [
            Definition(f"{name}/tp{ranks}.{rank}", "", BLOCK, groups, dtype="", layout="", rank=rank, state_pools=states)
            for rank in range(ranks)
        ]
        self.counters = _adapter.Counters(name)
        self.now = 0.0
        self.pool = Pool()
        self.side = Scheduler(Options(servers=node.address, **options), self.counters, extras or tokens_only(), clock=lambda: self.now)
        self.side.attach(self.definitions)
        self.side.bind(self.pool)
        self.store = Store(node.address)
        self.ranks = [open_namespace(self.store, d) for d in self.definitions]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.side.close()
        self.store.close()

    def lookup(self, request: Request, computed: int = 0) -> int:
        while (found := self.side.lookup(request, computed)) is None:
            pass
        return found

    def plan(self, request: Request, tokens: int, blocks: list[list[int]] | None = None, *snapshots: tuple[int, int, int]) -> Plan:
        """Let the engine compute tokens of a request, whose blocks are by default 1, 2, 3, …, and offer snapshots of recurrent state."""
        blocks = blocks or [list(range(1, len(request.all_token_ids) // BLOCK + 2))]
        plan = self.side.plan({request.request_id: tokens}, lambda name: blocks, {request.request_id: snapshots})
        request.num_computed_tokens += tokens
        return plan

    def idle(self) -> Plan:
        return self.side.plan({}, lambda name: [])

    def saved(self, plan: Plan, ranks: int | None = None) -> None:
        """Store the saves of a plan, and report them, for some of the ranks."""
        report = Report()
        for save in plan.saves:
            keys = _adapter.Chain.SIZE
            ids = [save.keys[i : i + keys] for i in range(0, len(save.keys), keys)]
            pieces, memory = self.layout.pieces(save.first, save.blocks)
            for ns in self.ranks[:ranks]:
                result = ns.put(ids, memory, first=save.first, pieces=pieces, epoch=save.epoch)
                report = report.merge(Report({save.job: (1, len(save.blocks[0]) if result.ok == len(pieces) else 0)}))
        self.side.update(report, (), ())

    def save_all(self, request: Request) -> None:
        self.saved(self.plan(request, request.num_tokens - request.num_computed_tokens))


def layout_of(groups: tuple[Group, ...]) -> Layout:
    """Return a layout in which each layer is a KV cache group of the engine, with 80 blocks of memory."""
    page = BLOCK * FULL.token_bytes
    layers = sum(group.layers for group in groups)
    memory = ctypes.create_string_buffer(layers * Pool.num_gpu_blocks * page)
    pools = itertools.count()
    made = []
    for group in groups:
        own = [
            Layer(f"layer {pool}", ctypes.addressof(memory) + pool * Pool.num_gpu_blocks * page, page, page, pool)
            for pool in itertools.islice(pools, group.layers)
        ]
        made.append(LayerGroup(group.window_tokens, own, group.kind == GroupKind.STATE))
    return Layout(made, layers, Pool.num_gpu_blocks, BLOCK, [(ctypes.addressof(memory), len(memory), memory)])


def extras(adapters: Adapters | None = None, **options: Any) -> Extras:
    """Return the extra keys of requests, with vLLM's keys of a block, in which all images begin at the second block."""

    def keys(request: Request, start: int, end: int) -> tuple[Any, ...] | None:
        lora = request.lora_request
        found: list[tuple[Any, ...]] = [] if lora is None else [("lora", lora.lora_name, lora.lora_path)]
        found += [("mm", image.identifier, BLOCK - start) for image in request.mm_features if start >= BLOCK]
        found += [("cache_salt", request.cache_salt)] if request.cache_salt and start == 0 else []
        return tuple(found) or None

    return Extras(keys, adapters, **options)


def tokens_only() -> Extras:
    """Only its tokens determine the blocks of a request."""
    return extras()


def prompt(name: str, blocks: int, more: int = 1) -> Request:
    return Request(name, [hash_ % 50000 for hash_ in range(7, 7 + blocks * BLOCK + more)])


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"vllm/{request.node.name}"


@pytest.fixture
def engine(node: testing.Node, name: str) -> Iterator[Engine]:
    with Engine(node, name) as e:
        yield e


def test_a_chain_is_the_same_however_its_tokens_come(node: testing.Node, name: str) -> None:
    with Store(node.address) as store:
        ns = store.namespace(name, block_tokens=BLOCK, layers=1, token_bytes=8, ids=True)
        tokens = list(range(100, 117))
        once, parts = _adapter.Chain(ns, BLOCK), _adapter.Chain(ns, BLOCK)
        assert once.extend(tokens) == 4
        for end in range(len(tokens) + 1):
            parts.extend(tokens[:end])
        assert once.ids == parts.ids == ns.chain(tokens).blob


def test_an_extra_decides_all_ids_from_its_block_on(node: testing.Node, name: str) -> None:
    with Store(node.address) as store:
        ns: Namespace = store.namespace(name, block_tokens=BLOCK, layers=1, token_bytes=8, ids=True)
        tokens = list(range(20))

        def ids(*extras: object) -> list[bytes]:
            chain = _adapter.Chain(ns, BLOCK)
            chain.extend(tokens, lambda start, end: extras[start // BLOCK] if start // BLOCK < len(extras) else None)
            return [bytes(chain.ids[i : i + 16]) for i in range(0, len(chain.ids), 16)]

        plain = ids()
        assert plain == list(ns.chain(tokens))
        image = ids(None, "image")
        assert image[0] == plain[0]
        assert not set(image[1:]) & set(plain)
        # Both the end and the content of an extra change the ids.
        chains = [plain, image, ids(None, "image", "image"), ids(None, b"image"), ids(None, ("image",)), ids("salt"), ids(None, "other")]
        assert len({chain[-1] for chain in chains}) == len(chains)
        with pytest.raises(InvalidError, match="of type object"):
            ids(object())


@dataclasses.dataclass
class Lora:
    """The part of vLLM's LoRARequest that the connector uses."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def write_adapter(directory: Path, weights: bytes, settings: str = "{}") -> str:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(settings)
    return str(directory)


@pytest.fixture
def adapters() -> Iterator[Adapters]:
    made = Adapters(str)
    yield made
    made.close()


def digest(adapters: Adapters, path: str, number: int = 1, **more: Any) -> str:
    return adapters.digest(Lora("a", number, path, **more)).result(60)


def test_an_adapter_is_the_content_of_its_files(adapters: Adapters, tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", b"weights")
    same = write_adapter(tmp_path / "same", b"weights")
    (tmp_path / "same" / "README.md").write_text("not read by the engine")
    others = [write_adapter(tmp_path / "other", b"WEIGHTS"), write_adapter(tmp_path / "alpha", b"weights", '{"lora_alpha": 2}')]
    found = [digest(adapters, path, number) for number, path in enumerate([first, same, *others], 1)]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert digest(adapters, first) == found[0]


def test_an_adapter_that_cannot_be_identified_is_named(adapters: Adapters, tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="at /nowhere cannot be read"):
        digest(adapters, "/nowhere", 8)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidError, match=r"empty has no file adapter_model\.\*"):
        digest(adapters, str(tmp_path / "empty"), 9)

    # Its files were replaced: the engine may have either version of the weights.
    path = write_adapter(tmp_path / "a", b"weights")
    before = digest(adapters, path)
    write_adapter(tmp_path / "a", b"weights")  # the same content
    assert digest(adapters, path) == before
    write_adapter(tmp_path / "a", b"WEIGHTS")
    with pytest.raises(InvalidError, match="have changed while the engine used them"):
        digest(adapters, path)
    write_adapter(tmp_path / "a", b"weights")  # the old content, but the engine may have loaded the other content
    with pytest.raises(InvalidError, match="have changed"):
        digest(adapters, path, load_inplace=True)

    # Its number belongs to another adapter: the engine uses that adapter's weights, except after a load in place.
    other = write_adapter(tmp_path / "b", b"weights of b")
    with pytest.raises(InvalidError, match="'a' has the number 1 of the adapter at "):
        digest(adapters, other, 1)
    assert digest(adapters, other, 1, load_inplace=True) == digest(adapters, other, 2)
    with pytest.raises(InvalidError, match="number 1 of the adapter at "):
        digest(adapters, path, 1)


def test_blocks_of_adapters_are_apart(node: testing.Node, name: str, adapters: Adapters, tmp_path: Path) -> None:
    """The adapter is a part of all ids, and so are the options that determine the KV of adapters in the engine."""
    path = write_adapter(tmp_path / "a", b"weights")
    loras = [None, Lora("a", 1, path), Lora("z", 7, path), Lora("b", 2, write_adapter(tmp_path / "b", b"WEIGHTS"))]
    loras.append(Lora("d", 3, path, is_3d_lora_weight=True))
    with Store(node.address) as store:
        ns = store.namespace(name, block_tokens=BLOCK, layers=1, token_bytes=8, ids=True)

        def ids(lora: Lora | None, dtype: str = "bfloat16", salt: str | None = None) -> list[bytes]:
            request = dataclasses.replace(prompt("p", 3), lora_request=lora, cache_salt=salt)
            made = extras(adapters, lora=(dtype,))
            while not made.ready(request):
                pass
            chain = _adapter.Chain(ns, BLOCK)
            chain.extend(request.all_token_ids, made.of(request))
            return [bytes(chain.ids[i : i + 16]) for i in range(0, len(chain.ids), 16)]

        base, one, renamed, other, three = map(ids, loras)
        assert base == list(ns.chain(prompt("p", 3).all_token_ids))
        assert one == renamed
        chains = [base, one, other, three, ids(loras[1], dtype="float16"), ids(loras[1], salt="s"), ids(None, salt="s")]
        assert len({i for chain in chains for i in chain}) == 3 * len(chains)


def test_a_request_waits_for_the_files_of_its_adapter_within_a_bound(node: testing.Node, name: str, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", b"weights")
    may_read, now = threading.Event(), [0.0]

    def find(path: str) -> str:
        assert may_read.wait(60)
        return path

    adapters = Adapters(find)
    e = Engine(node, name, extras=extras(adapters, timeout=5, clock=lambda: now[0]))
    with e:
        late, quick = (dataclasses.replace(prompt(r, 3), lora_request=Lora("a", 1, path)) for r in "lq")
        assert e.side.lookup(late, 0) is None
        assert e.lookup(prompt("base", 3)) == 0  # other requests do not wait
        now[0] = 5
        assert e.side.lookup(late, 0) == 0
        assert not e.plan(late, 13).saves
        assert e.side.lookup(late, 0) == 0
        assert e.counters["unnamed"] == 1
        assert e.side.lookup(quick, 0) is None
        may_read.set()
        assert e.lookup(quick) == 0
        e.save_all(quick)
        assert e.lookup(dataclasses.replace(prompt("again", 3), lora_request=Lora("b", 2, path))) == 12
        gone = dataclasses.replace(prompt("gone", 3), lora_request=Lora("c", 3, path))
        e.side.lookup(gone, 0)
        e.side.finished(gone, [])
        assert not e.side._extras._waiting
        assert e.counters["unnamed"] == 1


def test_images_that_the_engine_numbers_are_not_cached(engine: Engine) -> None:
    """Another process gives the same numbers to other images."""
    made = extras(images=False)
    request = dataclasses.replace(prompt("a", 3), mm_features=(image("renderer0-mm-1-image-0"),))
    with pytest.raises(InvalidError, match="numbers images and does not hash them"):
        made.of(request)
    assert made.of(prompt("b", 3)) is None


def image(hash_: str, lora: Lora | None = None) -> Any:
    """Return an image as vLLM's Request has it: with enable_tower_connector_lora its identifier begins with the adapter's name."""
    return SimpleNamespace(identifier=hash_ if lora is None else f"{lora.lora_name}:{hash_}", mm_hash=hash_)


def test_images_of_an_adapter_have_no_name(adapters: Adapters, tmp_path: Path) -> None:
    """Where an adapter changes the encoder of images, the ids have the adapter's digest and the image's hash, not the adapter's name."""
    path, other = write_adapter(tmp_path / "a", b"weights"), write_adapter(tmp_path / "b", b"WEIGHTS")
    made = extras(adapters, lora=(True,))

    def of(lora: Lora | None, *images: Any) -> list[object]:
        request = dataclasses.replace(prompt("p", 2), lora_request=lora, mm_features=images)
        while not made.ready(request):
            pass
        extra = made.of(request)
        return [] if extra is None else [extra(0, BLOCK), extra(BLOCK, 2 * BLOCK)]

    red, same, blue = Lora("red", 1, path), Lora("scarlet", 2, path), Lora("blue", 3, other)
    adapter = (digest(adapters, path), False, True)
    wanted: list[object] = [(adapter, ()), (adapter, (("mm", "x:1", 0), ("mm", "2", 0)))]
    for lora in (red, same):
        assert of(lora, image("x:1", lora), image("2", lora)) == wanted
        assert of(lora, image("x:1"), image("2")) == wanted  # without the option
    assert of(blue, image("2", blue))[1] == ((digest(adapters, other, 3), False, True), (("mm", "2", 0),))
    assert of(None, image("red:1")) == [None, (None, (("mm", "red:1", 0),))]

    # vLLM's cache of encoded images has the images of two adapters under one name.
    taken = Lora("red", 4, other)
    assert of(taken, image("2"))  # without the option there is one encoder
    for lora in (taken, red):
        with pytest.raises(InvalidError, match=r"an earlier adapter had the name 'red' .* give each adapter a name of its own"):
            of(lora, image("2", lora))
    assert of(taken)
    assert of(same, image("2", same))
    assert not made._waiting


def test_an_option_that_is_not_known_is_named() -> None:
    with pytest.raises(InvalidError, match="unknown option 'load_timout': did you mean 'load_timeout'"):
        _adapter.options(Options, {"servers": "a:1", "load_timout": 3}, where="here", environ={})
    with pytest.raises(InvalidError, match="no option 'servers'"):
        _adapter.options(Options, {}, where="here", environ={})
    with pytest.raises(InvalidError, match="here: option 'load': 'layer'; want 'async' or 'layers'"):
        _adapter.options(Options, {"servers": "a:1", "load": "layer"}, where="here", environ={})
    with pytest.raises(InvalidError, match="option 'load_timeout': 'soon'"):
        _adapter.options(Options, {"servers": "a:1", "load_timeout": "soon"}, where="here", environ={})
    environ = {"PENSTOCK_SERVERS": "b:1", "PENSTOCK_LOAD_TIMEOUT": "2.5", "PENSTOCK_INSECURE": "true"}
    got = _adapter.options(Options, {"servers": ["a:1", "a:2"]}, where="here", environ=environ)
    assert (got.servers, got.load_timeout, got.insecure) == ("a:1,a:2", 2.5, True)


def test_a_save_keeps_its_blocks_until_all_ranks_have_reported(node: testing.Node, name: str) -> None:
    with Engine(node, name, ranks=2) as e:
        request = prompt("a", 3)
        assert e.lookup(request) == 0
        plan = e.plan(request, 13)
        assert [s.blocks for s in plan.saves] == [[[1, 2, 3]]]
        assert e.pool.kept == {1, 2, 3}
        e.side.finished(request, [range(1, 5)])
        assert e.pool.kept == {1, 2, 3}
        e.saved(plan, ranks=1)
        assert e.pool.kept == {1, 2, 3}
        assert e.side.busy
        again = prompt("b", 3)
        assert e.lookup(again) == 0  # one rank has the blocks, the other has not
        e.saved(plan, ranks=1)
        assert not e.pool.kept
        assert not e.side.busy


def test_the_end_of_a_request_is_saved_after_its_beginning(engine: Engine) -> None:
    request = prompt("a", 3)
    engine.lookup(request)
    first = engine.plan(request, 8)
    assert [s.blocks for s in first.saves] == [[[1, 2]]]
    assert not engine.plan(request, 5).saves  # one save at a time: a block needs its predecessor
    assert engine.pool.kept == {1, 2, 3}
    engine.side.finished(request, [range(1, 5)])
    assert engine.pool.kept == {1, 2, 3}
    assert not engine.idle().saves
    engine.saved(first)
    second = engine.idle()
    assert [(s.first, s.blocks) for s in second.saves] == [(2, [[3]])]
    engine.saved(second)
    assert not engine.pool.kept
    assert engine.lookup(prompt("b", 3)) == 3 * BLOCK


def test_saves_are_bounded_and_what_is_dropped_is_counted(node: testing.Node, name: str) -> None:
    with Engine(node, name, save_blocks=2) as e:
        request = prompt("a", 5)
        e.lookup(request)
        plan = e.plan(request, 21)
        assert [s.blocks for s in plan.saves] == [[[1, 2]]]
        e.side.finished(request, [range(1, 7)])
        assert e.pool.kept == {1, 2}
        assert e.counters["dropped_blocks"] == 3
        e.saved(plan)
        assert e.lookup(prompt("b", 5)) == 2 * BLOCK


def test_a_save_that_the_node_refuses_ends_the_saves_of_its_request(engine: Engine) -> None:
    request = prompt("a", 3)
    engine.lookup(request)
    plan = engine.plan(request, 8)
    engine.side.update(Report({plan.saves[0].job: (1, 1)}), (), ())
    assert not engine.pool.kept
    assert engine.counters["dropped_blocks"] == 1
    assert not engine.plan(request, 5).saves
    engine.side.finished(request, [range(1, 5)])
    assert not engine.side.busy


def test_a_load_that_has_failed_is_not_tried_again(engine: Engine) -> None:
    first = prompt("a", 3)
    engine.lookup(first)
    engine.save_all(first)
    request = prompt("b", 3)
    assert engine.lookup(request) == 12
    engine.side.allocated(request, [[7, 8, 9, 10]], 12)
    (load,) = engine.idle().loads
    assert (load.first, load.blocks) == (0, [[7, 8, 9]])
    engine.side.update(None, ["b"], [8])
    assert engine.lookup(request) == 0
    # The engine computes the failed block and the blocks after it. The connector saves these blocks.
    request.num_computed_tokens = BLOCK
    assert [s.first for s in engine.plan(request, 9).saves] == [1]


@pytest.fixture
def by_layers(node: testing.Node, name: str) -> Iterator[Engine]:
    """A scheduler with load "layers" of two ranks. The blocks of the prompts "a" are stored."""
    with Engine(node, name, ranks=2, load="layers") as e:
        first = prompt("first", 3)
        e.lookup(first)
        e.save_all(first)
        yield e


def test_no_save_begins_until_all_ranks_have_ended_the_loads_of_the_step(by_layers: Engine) -> None:
    """A rank whose own loads are complete computes with what the others have reduced."""
    e = by_layers
    request, other = prompt("a", 5), prompt("other", 2)
    other.all_token_ids = [n + 1 for n in other.all_token_ids]
    assert e.lookup(request) == 12
    e.lookup(other)
    e.side.allocated(request, [[1, 2, 3, 4, 5, 6]], 12)
    request.num_computed_tokens = 12
    blocks = {"a": [[1, 2, 3, 4, 5, 6]], "other": [[11, 12, 13]]}
    plan = e.side.plan({"a": 9, "other": 9}, blocks.__getitem__)
    (load,) = plan.loads
    assert not plan.saves
    assert e.pool.kept == {4, 5, 11, 12}
    e.side.update(Report(loads={load.job: 1}), (), ())
    assert not e.idle().saves
    e.side.update(Report(loads={load.job: 1}), (), ())
    assert {save.first: save.blocks for save in e.idle().saves} == {3: [[4, 5]], 0: [[11, 12]]}
    assert not e.pool.evicted


def test_what_was_computed_from_a_failed_load_is_neither_saved_nor_found(by_layers: Engine) -> None:
    """The owner of the load computes its blocks again. A request that shares them in the step is not saved."""
    e = by_layers
    owner, sharer, other = prompt("a", 5), prompt("b", 6), prompt("other", 2)
    other.all_token_ids = [n + 1 for n in other.all_token_ids]
    assert e.lookup(owner) == 12
    e.side.allocated(owner, [[1, 2, 3, 4, 5, 6]], 12)
    assert e.lookup(sharer, computed=12) == 0  # the engine has shared the owner's blocks with the other request
    e.lookup(other)
    owner.num_computed_tokens = sharer.num_computed_tokens = 12
    blocks = {"a": [[1, 2, 3, 4, 5, 6]], "b": [[1, 2, 3, 21, 22, 23, 24]], "other": [[11, 12, 13]], "unknown": [[31, 2]]}
    (load,) = e.side.plan({"a": 9, "b": 13, "other": 9, "unknown": 1}, blocks.__getitem__).loads
    # The second rank lacks block 2. The engine resets the owner to the end of block 1.
    e.side.update(Report(loads={load.job: 2}), (), {2})
    owner.num_computed_tokens, other.num_computed_tokens = 4, 9
    assert e.pool.evicted == {2, 3, 4, 5, 6, 21, 22, 23, 24}
    plan = e.side.plan({"a": 17, "b": 1}, blocks.__getitem__)
    assert {save.first: save.blocks for save in plan.saves} == {1: [[2, 3, 4, 5]], 0: [[11, 12]]}
    e.saved(plan)
    e.side.finished(sharer, blocks["b"])
    assert not e.pool.kept
    assert not e.side.busy
    assert e.lookup(prompt("c", 6)) == 20


def test_a_request_that_ends_in_the_step_of_a_failed_load_is_not_saved(by_layers: Engine) -> None:
    e = by_layers
    request = prompt("a", 5)
    assert e.lookup(request) == 12
    e.side.allocated(request, [[1, 2, 3, 4, 5, 6]], 12)
    request.num_computed_tokens = 12
    (load,) = e.plan(request, 9, [[1, 2, 3, 4, 5, 6]]).loads
    e.side.finished(request, [[1, 2, 3, 4, 5, 6]])
    assert e.side.busy
    e.side.update(Report(loads={load.job: 2}), (), {3})
    assert not e.idle().saves
    assert not e.pool.kept
    assert not e.side.busy


def test_parts_are_in_the_order_of_the_model() -> None:
    def layers(*names: int) -> list[Layer]:
        return [Layer(f"model.layers.{n}.attn", 1000 * n, 8, 8, 0) for n in names]

    layout = Layout([LayerGroup(0, layers(0, 2, 9, 10, 11)), LayerGroup(64, layers(1, 3))], 1, 80, BLOCK, [])
    parts = layout.parts(2)
    assert [(p.group, p.range, [int(layer.name.split(".")[2]) for layer in p.layers]) for p in parts] == [
        (0, (0, 2), [0, 2]),
        (1, (0, 2), [1, 3]),
        (0, (2, 2), [9, 10]),
        (0, (4, 1), [11]),
    ]
    pieces, memory = layout.pieces(3, [[5, 6]], parts[2])
    assert pieces == [(3, 0), (4, 0)]
    assert list(memory.addresses) == [9040, 10040, 9048, 10048]


def test_only_what_the_engine_does_not_have_is_loaded(engine: Engine) -> None:
    first = prompt("a", 3)
    engine.lookup(first)
    engine.save_all(first)
    request = prompt("b", 3)
    assert engine.lookup(request, computed=4) == 8
    engine.side.allocated(request, [[1, 7, 8, 9]], 8)
    (load,) = engine.idle().loads
    assert (load.first, load.blocks) == (1, [[7, 8]])
    assert engine.lookup(prompt("c", 3), computed=12) == 0
    assert engine.lookup(prompt("d", 3, more=0)) == 8  # the engine computes the last block


def test_a_block_that_leaves_its_window_is_saved_nevertheless(node: testing.Node, name: str) -> None:
    """The engine needs the six tokens before the next one, so it frees older blocks of the window layers in each step."""
    with Engine(node, name, groups=(FULL, WINDOW), save_blocks=80) as e:
        request = prompt("a", 6)
        e.lookup(request)
        first = e.plan(request, 4, [[1], [11], [21]])
        assert [s.blocks for s in first.saves] == [[[1], [11], [21]]]
        # During the save blocks 2 and 3 are computed, and are then outside the window.
        assert not e.plan(request, 8, [[1, 2, 3], [11, 12, 13], [21, 22, 23]]).saves
        assert not e.plan(request, 8, [[1, 2, 3, 4, 5], [0, 12, 13, 14, 15], [0, 22, 23, 24, 25]]).saves
        e.saved(first)
        second = e.plan(request, 4, [[1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16], [0, 0, 0, 24, 25, 26]])
        assert [(s.first, s.blocks) for s in second.saves] == [(1, [[2, 3, 4, 5, 6], [12, 13, 14, 15, 16], [22, 23, 24, 25, 26]])]
        e.saved(second)
        assert not e.pool.kept
        for blocks in range(7):
            assert e.lookup(prompt(f"b{blocks}", blocks)) == blocks * BLOCK


def test_a_prefix_that_lacks_its_window_is_not_found(node: testing.Node, name: str) -> None:
    with Engine(node, name, groups=(FULL, WINDOW), save_blocks=80) as e:
        request = prompt("a", 6)
        e.lookup(request)
        # The engine had the first four blocks; of their window layers only the last two.
        request.num_computed_tokens = 16
        e.saved(e.plan(request, 8, [[1, 2, 3, 4, 5, 6], [0, 0, 13, 14, 15, 16], [0, 0, 23, 24, 25, 26]]))
        found = [e.lookup(prompt(f"b{blocks}", blocks)) // BLOCK for blocks in range(7)]
        assert found == [0, 0, 0, 0, 4, 5, 6]


def test_a_request_that_has_failed_is_saved_again(node: testing.Node, name: str) -> None:
    """The engine computes a failed request of several KV cache groups from its beginning."""
    with Engine(node, name, groups=(FULL, WINDOW), save_blocks=80) as e:
        first = prompt("a", 3)
        e.lookup(first)
        e.saved(e.plan(first, 13, [[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]]))
        request = prompt("b", 3)
        assert e.lookup(request) == 12
        e.side.allocated(request, [[5, 6, 7], [0, 16, 17], [0, 26, 27]], 12)
        (load,) = e.idle().loads
        assert e.layout.pieces(load.first, load.blocks)[0] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
        e.side.update(None, ["b"], (), ["b"])
        assert e.lookup(request) == 0
        assert [s.first for s in e.plan(request, 13, [[5, 6, 7, 8], [15, 16, 17, 18], [25, 26, 27, 28]]).saves] == [0]


@pytest.mark.parametrize(
    ("groups", "whole"),
    [((FULL,), False), ((WINDOW._replace(layers=1),), True), ((FULL, WINDOW), True), ((FULL, STATE), True)],
    ids=["full", "window", "full and window", "full and state"],
)
def test_what_is_computed_after_a_failed_load(groups: tuple[Group, ...], whole: bool) -> None:
    """Only where all layers have full attention does the engine continue from the first failed block. The window in front of that block
    was not loaded."""
    worker = Worker(Options(), _adapter.Counters("x"))
    worker._layout = layout_of(groups)
    blocks = [[0 if pool or whole else 7, 10 * pool + 8, 10 * pool + 9] for pool in range(worker._layout.pools)]
    worker.load(Plan(loads=[Load(1, "a", b"", 2, blocks)]))
    assert worker.take_loaded() == ({"a"}, {"a"} if whole else set())
    assert worker.take_failed() == (set() if whole else {7, 8, 9})


def test_a_load_without_a_block_for_the_state(node: testing.Node, name: str) -> None:
    """A load of a prefix fails if the engine has no block for the recurrent state at its end."""
    with Engine(node, name, groups=(FULL, STATE)) as e:
        worker = Worker(Options(load_timeout=60), _adapter.Counters(name))
        worker._layout, worker.definition = e.layout, e.definitions[0]
        link: Any = SimpleNamespace(value=_Open(e.store, e.ranks[0], e.store, e.ranks[0]))
        worker._link = link
        request = prompt("a", 2)
        e.lookup(request)
        save = e.plan(request, 8, [[1, 2], [11, 12], [21, 22]], (1, 12, 8), (2, 22, 8))
        e.saved(save)
        for state, failed in ((0, {"a"}), (32, set())):
            worker.load(Plan(loads=[Load(1, "a", save.saves[0].keys, 0, [[4, 5], [0, state], [0, 42]])], epochs=save.epochs))
            while not (ended := worker.take_loaded())[0]:
                worker.poll()
            assert ended == ({"a"}, failed)


def test_order_of_the_layers() -> None:
    """Layers are in the order of computation, which is that of the numbers in their names, with their indexes in a value."""
    names = [["model.layers.10.attn", "model.layers.1.attn"], ["model.layers.2.attn", "model.layers.0.attn", "model.layers.11.attn"]]
    groups = [LayerGroup(6 * g, [Layer(name, 0, 8, 8, 0) for name in group]) for g, group in enumerate(names)]
    layers, order = Layout(groups, 1, 8, BLOCK, []).in_order()
    assert [layer.name.split(".")[2] for layer in layers] == ["0", "1", "2", "10", "11"]
    assert order == [3, 1, 2, 0, 4]


@dataclasses.dataclass
class ChunkedLocalAttentionSpec:
    """The part of vLLM's specification that the connector uses."""

    attention_chunk_size: int
    block_size: int


@pytest.mark.parametrize(("chunk", "block"), [(96, 32), (64, 32), (32, 32), (16, 32), (48, 32), (8192, 16), (100, 16), (7, 4)])
def test_a_window_has_all_blocks_of_a_begun_chunk(chunk: int, block: int) -> None:
    """It has no more blocks than the longest part of a chunk before a block."""
    reads = _layout._reads("a", ChunkedLocalAttentionSpec(chunk, block))
    before = [end // block - end // chunk * chunk // block for end in range(0, 4 * chunk * block, block)]
    assert -(-reads.window // block) == max(1, *before)


def test_a_prefix_is_found_up_to_a_snapshot(node: testing.Node, name: str) -> None:
    """The table of a request may have another state at the place of a block. Only an offered snapshot is saved."""
    with Engine(node, name, groups=(FULL, STATE), save_blocks=80) as e:
        request = prompt("a", 6)
        e.lookup(request)
        first = e.plan(request, 12, [[1, 2, 3], [11, 12, 13], [21, 22, 23]], (1, 13, 12), (2, 23, 12))
        assert [s.blocks for s in first.saves] == [[[1, 2, 3], [0, 0, 13], [0, 0, 23]]]
        assert e.pool.kept == {1, 2, 3, 13, 23}
        # While this is saved, the state after 16 tokens is offered of one layer, and the state after 17 of both.
        offered = (1, 14, 16), (1, 15, 17), (2, 25, 17)
        table = [[1, 2, 3, 4, 5], [0, 0, 13, 14, 15], [0, 0, 23, 24, 25]]
        assert not e.plan(request, 5, table, *offered).saves
        e.saved(first)
        second = e.plan(request, 8, [[*range(1, 8)], [0, 0, 0, 0, 15, 16, 17], [0, 0, 0, 0, 25, 26, 27]], (1, 16, 24), (2, 26, 24))
        assert [(s.first, s.blocks) for s in second.saves] == [(3, [[4, 5, 6], [14, 0, 16], [0, 0, 26]])]
        e.saved(second)
        assert not e.pool.kept
        found = [e.lookup(prompt(f"b{blocks}", blocks)) // BLOCK for blocks in range(7)]
        assert found == [0, 0, 0, 3, 3, 3, 6]

        # A load takes the blocks that the engine has allocated, of the layers with state the last one.
        loading = prompt("c", 5)
        assert e.lookup(loading, 4) == 8
        e.side.allocated(loading, [[1, 32, 33], [0, 0, 43], [0, 0, 53]], 8)
        (load,) = e.idle().loads
        assert e.layout.pieces(load.first, load.blocks)[0] == [(1, 0), (2, 0), (2, 1)]
        # The engine may have a part of a block, which no block of the node can follow.
        assert e.lookup(prompt("d", 6), 6) == 0

        # The request ends. There was no room for the snapshot of its last block.
        e.side.finished(loading, [[1, 32, 33], [0, 0, 43], [0, 0, 53]])


def test_ranks_whose_prefixes_end_at_other_snapshots(node: testing.Node, name: str) -> None:
    """The shorter prefix of one rank has no snapshot in the other rank, so both have only a still shorter one in common."""
    with Engine(node, name, ranks=2, groups=(FULL, STATE), save_blocks=80) as e:
        for rank, offered in enumerate([(2, 6), (2, 4)]):
            request = prompt(f"a{rank}", 6)
            e.side.lookup(request, 0)
            snapshots = [(pool, 10 * pool + blocks, blocks * BLOCK) for blocks in offered for pool in (1, 2)]
            plan = e.plan(request, 24, [[*range(1, 7)], [*range(11, 17)], [*range(21, 27)]], *snapshots)
            ranks, e.ranks = e.ranks, [e.ranks[rank], e.ranks[rank]]
            e.saved(plan)
            e.ranks = ranks
        assert e.lookup(prompt("b", 6)) == 2 * BLOCK


def test_blocks_that_wait_keep_their_places(engine: Engine) -> None:
    """A request is preempted while blocks of it wait for a save. Afterwards a lookup finds more stored blocks."""
    other, request = prompt("other", 5), prompt("a", 5)
    engine.lookup(other)
    engine.lookup(request)
    engine.save_all(other)
    first = engine.plan(request, 8)
    assert not engine.plan(request, 8).saves
    engine.saved(first)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.lookup(request) == 5 * BLOCK
    (save,) = engine.idle().saves
    assert (save.first, save.blocks, len(save.keys)) == (2, [[3, 4]], 4 * _adapter.Chain.SIZE)


def test_new_weights(engine: Engine) -> None:
    first, running = prompt("a", 3), prompt("r", 3)
    engine.lookup(first)
    engine.save_all(first)
    engine.lookup(running)
    assert engine.side.reset()
    assert engine.lookup(prompt("b", 3)) == 0
    assert not engine.plan(running, 13).saves  # its blocks are of both versions of the weights
    again = prompt("c", 3)
    engine.lookup(again)
    plan = engine.plan(again, 13)
    assert plan.epochs == [2]
    for ns in engine.ranks:
        ns.refresh()
    engine.saved(plan)
    assert engine.lookup(prompt("d", 3)) == 12
    # A worker's hook has begun an epoch.
    assert [ns.bump(9) for ns in engine.ranks] == [9]
    engine.side.update(Report(epochs={0: 9}), (), ())
    assert engine.lookup(prompt("e", 3)) == 0
    assert engine.idle().epochs == [9]


def at_epoch(request: Request, epoch: int) -> Request:
    request.kv_transfer_params = {"penstock": {"epoch": epoch}}
    return request


def test_requests_that_name_their_epoch(node: testing.Node, name: str) -> None:
    """Two engines get new weights one after another. A request finds and stores only blocks of its epoch."""
    with Engine(node, name, ranks=2, live_epochs=2) as fast, Engine(node, name, ranks=2, live_epochs=2) as slow:
        for engine in (fast, slow):
            assert engine.lookup(prompt("before", 3)) == 0
        for epoch in (5, 6):
            request = at_epoch(prompt(f"first of {epoch}", 3), epoch)
            assert fast.lookup(request) == 0
            plan = fast.plan(request, 13)
            assert [s.epoch for s in plan.saves] == [epoch]
            fast.saved(plan)
            assert fast.counters["dropped_blocks"] == 0
        longer = at_epoch(prompt("slow", 4), 5)
        assert slow.lookup(longer) == 12
        slow.side.allocated(longer, [[1, 2, 3]], 12)
        plan = slow.plan(longer, 17)
        assert [load.epoch for load in plan.loads] == [5]
        slow.side.update(None, [longer.request_id], ())
        slow.saved(plan)
        assert fast.lookup(at_epoch(prompt("found", 4), 5)) == 16
        assert fast.lookup(at_epoch(prompt("of the next", 4), 6)) == 12

        assert slow.lookup(at_epoch(prompt("now 7", 3), 7)) == 0
        for ended in (at_epoch(prompt(name, 3), 5) for name in "ab"):
            assert slow.lookup(ended) == 0
            assert not slow.plan(ended, 13).saves
        assert slow.counters["unavailable"] == 2
        assert fast.lookup(at_epoch(prompt("of 6", 4), 6)) == 12
        assert fast.lookup(prompt("names none", 3)) == 0


def of_epochs(request: Request, oldest: int, newest: int, salt: str | None = "bounded") -> Request:
    request.kv_transfer_params, request.cache_salt = {"penstock": {"epoch": newest, "oldest": oldest}}, salt
    return request


def store_at(e: Engine, epoch: int, blocks: int) -> None:
    """Let a request of one epoch compute and store blocks."""
    request = of_epochs(prompt(f"of {epoch}", blocks), epoch, epoch)
    assert e.lookup(request) == 0
    e.save_all(request)


def test_requests_that_take_kv_of_older_epochs(node: testing.Node, name: str) -> None:
    """KV that depends on an older epoch is stored under it, and not found in the engine's prefix cache."""
    with Engine(node, name, ranks=2, live_epochs=2) as e:
        store_at(e, 5, 3)
        assert e.lookup(of_epochs(prompt("of 6 alone", 4), 6, 6)) == 0

        older = of_epochs(prompt("older", 4), 5, 6)
        assert e.lookup(older) == 12
        e.side.allocated(older, [[1, 2, 3, 4, 5]], 12)
        older.num_computed_tokens = 12
        # The engine's scheduler has given blocks of it to another request in the same step, and none to a third one.
        sharer, apart = of_epochs(prompt("sharer", 4), 5, 6), of_epochs(prompt("apart", 4), 5, 6)
        assert e.lookup(sharer, 12) == e.lookup(apart, 12) == 0
        blocks = {"older": [[1, 2, 3, 4, 5]], "sharer": [[1, 2, 3, 9, 10]], "apart": [[21, 22, 23, 24, 25]]}
        e.side.allocated(sharer, blocks["sharer"], 0)
        e.side.allocated(apart, blocks["apart"], 0)
        plan = e.side.plan({"older": 5, "sharer": 17, "apart": 17}, blocks.__getitem__)
        assert [load.epoch for load in plan.loads] == [5]
        assert [(save.epoch, save.first, save.blocks) for save in plan.saves] == [
            (5, 3, [[4]]), (5, 0, [[1, 2, 3, 9]]), (6, 0, [[21, 22, 23, 24]]),
        ]  # fmt: skip
        assert e.pool.evicted == {1, 2, 3, 4, 5, 9, 10}
        assert e.counters["older_hits"] == 1
        e.saved(plan)
        assert e.counters["dropped_blocks"] == 0
        # Blocks of a decode step, while no node answers; the second group has left its window.
        e.pool.evicted.clear()
        e.side._down_until = e.now + 1
        e.side.plan({"older": 1}, {"older": [[1, 2, 3, 4, 5, 30], [0, 0, 0, 0, 0, 31]]}.__getitem__)
        assert e.pool.evicted == {1, 2, 3, 4, 5, 30, 31, 9, 10}
        e.now += 1
        for request in (older, sharer, apart):
            e.side.finished(request, blocks[request.request_id])
        e.pool.evicted.clear()
        e.idle()
        assert not e.pool.evicted

        # Epoch 6 has as much as 5: it is found, and what follows is saved there.
        newer = of_epochs(prompt("newer", 5), 5, 6)
        assert e.lookup(newer) == 16
        e.side.allocated(newer, [[1, 2, 3, 4, 5, 6]], 16)
        newer.num_computed_tokens = 16
        plan = e.plan(newer, 5)
        assert ([load.epoch for load in plan.loads], [save.epoch for save in plan.saves]) == ([6], [6])
        assert not e.pool.evicted


def test_older_kv_behind_a_block_that_the_engine_has(node: testing.Node, name: str) -> None:
    with Engine(node, name, live_epochs=2) as e:
        store_at(e, 5, 3)
        request = of_epochs(prompt("a", 5), 5, 6)
        assert e.lookup(request, 4) == 8
        e.side.allocated(request, [[41, 42, 43, 44, 45]], 8)
        request.num_computed_tokens = 12
        plan = e.plan(request, 9, [[41, 42, 43, 44, 45]])
        assert [(load.epoch, load.first, load.blocks) for load in plan.loads] == [(5, 1, [[42, 43]])]
        assert [(save.epoch, save.first, save.blocks) for save in plan.saves] == [(5, 3, [[44, 45]])]
        e.saved(plan)
        assert e.counters["dropped_blocks"] == 0


def test_a_preempted_request_that_took_kv_of_an_older_epoch(node: testing.Node, name: str) -> None:
    """It takes the newer epoch if that has more by now, and its KV then depends on the newer one alone."""
    with Engine(node, name, live_epochs=2) as e:
        store_at(e, 5, 3)
        request = of_epochs(prompt("a", 5), 5, 6)
        assert e.lookup(request) == 12
        e.side.allocated(request, [[1, 2, 3, 4, 5, 6]], 12)
        e.side.plan({}, lambda name: [])
        e.side.update(None, ["a"], ())
        store_at(e, 6, 4)
        e.pool.evicted.clear()
        request.num_preemptions = 1
        assert e.lookup(request) == 16
        e.side.allocated(request, [[11, 12, 13, 14, 15, 16]], 16)
        request.num_computed_tokens = 16
        plan = e.plan(request, 5, [[11, 12, 13, 14, 15, 16]])
        assert ([load.epoch for load in plan.loads], [save.epoch for save in plan.saves]) == ([6], [6])
        assert not e.pool.evicted
        assert e.counters["older_hits"] == 1


def test_ranks_that_have_different_epochs(node: testing.Node, name: str) -> None:
    """All ranks load blocks of one epoch."""
    with Engine(node, name, ranks=2, live_epochs=2) as e:
        for epoch, blocks, ranks in ((5, 3, 2), (6, 4, 1)):
            request = of_epochs(prompt(f"of {epoch}", blocks), epoch, epoch)
            assert e.lookup(request) == 0
            e.saved(e.plan(request, blocks * BLOCK + 1), ranks)
        request = of_epochs(prompt("a", 5), 5, 6)
        assert e.lookup(request) == 12
        e.side.allocated(request, [[1, 2, 3, 4, 5]], 12)
        assert [load.epoch for load in e.idle().loads] == [5]


def test_a_range_of_epochs_needs_a_cache_salt(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    request = of_epochs(prompt("a", 3), 6, 7, salt=None)
    assert engine.lookup(request) == 0
    assert not engine.plan(request, 13).saves
    assert engine.counters["unnamed"] == 1
    assert "takes KV of the epochs 6 to 7 and has no cache_salt" in caplog.text


def test_an_epoch_that_no_node_begins(name: str) -> None:
    """A request waits for lookup_timeout at most, and the epoch begins when the node is available again."""
    with testing.node() as node, Engine(node, name, lookup_timeout=60, retry_interval=10) as e:
        assert e.lookup(prompt("before", 3)) == 0
        node.pause()
        request = at_epoch(prompt("a", 3), 2)
        assert e.side.lookup(request, 0) is None
        e.now += 60
        assert e.side.lookup(request, 0) == 0
        assert not e.plan(request, 13).saves
        assert (e.counters["lookup_failures"], e.counters["lookups"]) == (1, 1)
        node.resume()
        e.now += 10
        again = at_epoch(prompt("b", 3), 2)
        assert e.lookup(again) == 0
        e.save_all(again)
        assert e.lookup(at_epoch(prompt("c", 3), 2)) == 12


def test_kv_transfer_params_that_are_wrong(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    wrong: list[Any] = [7, {}, {"epoch": 0}, {"epoch": True}, {"epoch": "7"}, {"epoch": 1 << 63}, {"epoch": 7, "other": 1}]
    wrong += [{"oldest": 7}, {"epoch": 7, "oldest": 8}, {"epoch": 7, "oldest": 0}, {"epoch": 7, "oldest": "6"}]
    for i, named in enumerate(wrong):
        request = prompt(str(i), 3)
        request.kv_transfer_params = {"penstock": named}
        assert engine.lookup(request) == 0
        assert not engine.plan(request, 13).saves
        assert engine.counters["unnamed"] == i + 1
        assert f"is {named!r}" in caplog.text
    other = prompt("of another connector", 3)
    other.kv_transfer_params = {"do_remote_prefill": False}
    engine.lookup(other)
    assert engine.plan(other, 13).saves


def test_a_node_that_is_away_is_left_alone_for_a_while(name: str) -> None:
    with testing.node() as node, Engine(node, name, lookup_timeout=60, retry_interval=10) as e:
        first = prompt("a", 3)
        e.lookup(first)
        e.save_all(first)
        node.pause()
        e.side._options = dataclasses.replace(e.side._options, lookup_timeout=0.2, connect_timeout=0.2)
        assert e.lookup(prompt("b", 3)) == 0
        assert (e.counters["lookup_failures"], e.counters["unavailable"]) == (1, 0)
        for other in "cd":
            assert e.lookup(prompt(other, 3)) == 0
        assert (e.counters["lookup_failures"], e.counters["unavailable"]) == (1, 2)
        assert not e.side.reset()  # no node confirms the epoch
        node.resume()
        e.side._options = dataclasses.replace(e.side._options, lookup_timeout=60)
        while e.side._opened() is None:  # the epoch has not begun
            e.now += 100
            assert e.side._bumping is not None
            e.side._bumping.exception(60)
        e.now += 100
        assert e.lookup(prompt("e", 3)) == 0  # the stored blocks belong to the old weights
        assert e.counters["lookups"] == 2


def test_without_a_node_requests_are_counted() -> None:
    counters = _adapter.Counters("vllm/none")
    side = Scheduler(Options(servers="127.0.0.1:1", connect_timeout=0.1), counters, tokens_only())
    side.attach([Definition("none", "", BLOCK, (FULL,), "", "", 0)])
    side.bind(Pool())
    request = prompt("a", 3)
    assert side.lookup(request, 0) == 0
    assert side.plan({"a": 13}, lambda name: [range(1, 5)]) == Plan()
    side.finished(request, [range(1, 5)])
    assert counters["unavailable"] == 1
    side.close()


def test_a_wrong_token_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with testing.node(token="0123456789abcdef") as node:
        counters = _adapter.Counters("vllm/token")
        side = Scheduler(Options(servers=node.address, connect_timeout=60, token="another token, also long"), counters, tokens_only())
        side.attach([Definition("token", "", BLOCK, (FULL,), "", "", 0)])
        side.bind(Pool())
        for name in "abc":
            assert side.lookup(prompt(name, 3), 0) == 0
        assert counters["unavailable"] == 3
        assert side.reset()
        side.close()
    assert [r.levelname for r in caplog.records if r.name == "penstock.vllm"] == ["ERROR"]


def test_another_geometry_is_refused(node: testing.Node, name: str, engine: Engine) -> None:
    counters = _adapter.Counters("vllm/geometry")
    side = Scheduler(Options(servers=node.address, connect_timeout=60), counters, tokens_only())
    side.attach([dataclasses.replace(engine.definitions[0], groups=(Group(GroupKind.FULL, 1, 16),))])
    side.bind(Pool())
    assert side.lookup(prompt("a", 3), 0) == 0
    assert counters["unavailable"] == 1
    side.close()
