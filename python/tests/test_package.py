"""Tests of the package against penstock.h, of the examples, and of the content of the wheel."""

from __future__ import annotations

import ctypes
import doctest
import importlib.metadata
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import _abi, _cluster, _keys, _memory, _store, _traffic, errors, testing

HEADER = (_abi.library_path().parent / "penstock.h").read_text()
ROOT = Path(__file__).parents[2]

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "penstock_error": _abi.CError,
    "penstock_options": _abi.COptions,
    "penstock_group": _abi.CGroup,
    "penstock_definition": _abi.CDefinition,
    "penstock_batch": _abi.CBatch,
    "penstock_result": _abi.CResult,
    "penstock_planner": _abi.CPlanner,
    "penstock_member": _abi.CMember,
    "penstock_leader_options": _abi.CLeaderOptions,
    "penstock_part": _abi.CPart,
    "penstock_action": _abi.CAction,
    "penstock_start": _abi.CStart,
    "penstock_gateway_options": _abi.CGatewayOptions,
    "penstock_resident": _abi.CResident,
    "penstock_prompt": _abi.CPrompt,
    "penstock_event": _abi.CEvent,
    "penstock_traffic_options": _abi.CTrafficOptions,
    "penstock_traffic_description": _abi.CTrafficDescription,
    "penstock_transfer_options": _abi.CTransferOptions,
    "penstock_transfer_event": _abi.CTransferEvent,
}

TYPES = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "penstock_job": ctypes.c_uint64,
    "penstock_lease": ctypes.c_uint64,
    "penstock_attempt": ctypes.c_uint64,
    "penstock_request": ctypes.c_uint64,
    "penstock_transfer": ctypes.c_uint64,
    "penstock_part": _abi.CPart,
    "penstock_error": _abi.CError,
    "penstock_log": _abi.LogCallback,
}


def declared(name: str) -> list[tuple[str, str]]:
    """Return type and name of each field of a structure of the header."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", HEADER, re.S)
    assert body, name
    text = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S)
    fields = [line.strip() for line in text.split(";") if line.strip()]
    return [(" ".join(f.rsplit(None, 1)[0].split()), f.rsplit(None, 1)[1]) for f in fields]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_equal_the_header(name: str) -> None:
    structure: Any = STRUCTURES[name]
    fields = declared(name)
    assert [f.lstrip("*").split("[")[0] for _, f in fields] == [f[0] for f in structure._fields_]
    for (kind, field), (_, have) in zip(fields, structure._fields_, strict=True):
        if field.startswith("*"):
            assert ctypes.sizeof(have) == ctypes.sizeof(ctypes.c_void_p), field
        elif "[" in field:
            assert ctypes.sizeof(have) == int(field.split("[")[1].rstrip("]")), field
        else:
            assert have is TYPES[kind], field


def constants(prefix: str) -> dict[str, int]:
    found = re.findall(rf"\b{prefix}(\w+) = (-?\d+)", HEADER)
    assert found, prefix
    return {name: int(number) for name, number in found}


def test_constants_equal_the_header() -> None:
    assert constants("PENSTOCK_KEY_") == {k.name: k for k in penstock.KeyResult}
    assert constants("PENSTOCK_CUT_") == {c.name: c for c in penstock.Cut}
    assert constants("PENSTOCK_GROUP_") == {g.name: g for g in penstock.GroupKind}
    assert constants("PENSTOCK_KEYS_") == {"ANY": _abi.KEYS_ANY, "IDS": _abi.KEYS_IDS}
    assert constants("PENSTOCK_ROLE_") == {r.name: r for r in penstock.Role}
    assert constants("PENSTOCK_ACTION_") == {a.name: a for a in penstock.ActionKind}
    assert constants("PENSTOCK_EVENT_") == {e.name: e for e in penstock.EventKind}
    assert constants("PENSTOCK_TRANSFER_") == {k.name: k for k in penstock.TransferKind}
    for name, number in constants("PENSTOCK_OP_").items():
        assert getattr(_abi, f"OP_{name}") == number
    names = {number: name.replace("_", "").lower() + "error" for name, number in constants("PENSTOCK_ERR_").items()}
    names[_abi.ERR_TIMEOUT] = "timedouterror"
    assert names == {code: kind.__name__.lower() for code, kind in errors.BY_CODE.items()}
    version = re.search(r"PENSTOCK_ABI_VERSION (0x[0-9a-f]+)u", HEADER)
    assert version
    assert int(version[1], 16) >> 16 == _abi.ABI_MAJOR
    longest = re.search(r"PENSTOCK_KEY_MAX (\d+)", HEADER)
    assert longest
    assert int(longest[1]) == _keys.KEY_MAX


def test_functions_have_the_arguments_of_the_header() -> None:
    for name, arguments in _abi.PROTOTYPES.items():
        declaration = re.search(rf"^int32_t {name}\((.*?)\);", HEADER, re.M | re.S)
        assert declaration, name
        assert len(declaration[1].split(",")) == len(arguments), name


def test_exported_names_exist_and_are_documented() -> None:
    for name in penstock.__all__:
        value = getattr(penstock, name)
        if isinstance(value, type):
            assert value.__doc__, name


@pytest.mark.parametrize("module", [penstock, _store, _cluster, _traffic, _keys, _memory, errors, testing], ids=lambda m: m.__name__)
def test_examples_of_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.failed == 0


@pytest.mark.parametrize("page", ["docs/python.md", "README.md"])
def test_examples_of_pages(page: str) -> None:
    """Run the Python examples of a page."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert blocks, page
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    names: dict[str, Any] = {}
    for i, block in enumerate(blocks):
        test = parser.get_doctest(block, names, f"{page}[{i}]", page, 0)
        assert test.examples, f"{page}: a Python block has no example:\n{block}"
        runner.run(test, clear_globs=False)
        names.update(test.globs)
    assert runner.summarize(verbose=False).failed == 0


def test_the_wheel() -> None:
    metadata = importlib.metadata.metadata("penstock")
    assert metadata["Requires-Python"] == ">=3.10"
    assert importlib.metadata.requires("penstock") is None
    files = {str(f) for f in importlib.metadata.files("penstock") or []}
    for name in ("py.typed", "_bundled/libpenstock.so", "_bundled/penstock", "_bundled/penstock.h"):
        assert f"penstock/{name}" in files
    assert os.access(_abi.library_path().parent / "penstock", os.X_OK)
    wheel = (importlib.metadata.distribution("penstock").read_text("WHEEL") or "").splitlines()
    assert "Tag: py3-none-manylinux_2_28_x86_64" in wheel
    assert "Root-Is-Purelib: false" in wheel
    modules = {m.name for m in pkgutil.iter_modules(penstock.__path__)}
    assert {"testing", "errors"} <= modules
