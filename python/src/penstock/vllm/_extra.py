"""Extra keys, which decide the KV of a block beside its tokens: a LoRA adapter, a cache salt, images, embeddings of the prompt.

vLLM's own block hashes contain the name and the path of an adapter. Neither identifies weights in another process: a trainer
writes new weights to the same path, and another host has another adapter there. The connector identifies an adapter by a
digest of its files, so that the same adapter is found under every name, number and path, and another adapter under none.

    adapter_config.json, adapter_model.safetensors ─► digest ─┐
    LoRA's dtype and modules in the engine ───────────────────┴► extra of every block ─┐
    vLLM's keys of the block: salt, images, embeddings ─► extra of that block ─────────┴► Chain

With ``--enable-tower-connector-lora`` an adapter changes the encoder of images too. vLLM then puts the adapter's name in front of an
image's hash, in its keys and in its cache of encoded images. The extras have the hash without the name, beside the adapter's digest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from penstock import _adapter, errors

__all__ = ["Adapters", "Extra", "Extras"]

_log = logging.getLogger("penstock.vllm")

Extra = Callable[[int, int], object]
"""Takes the first token of a block and the first token after it, and returns the facts other than tokens that determine
the block's KV."""

_Signature = tuple[tuple[str, int, int, int, int], ...]

_Known = dict[str, tuple[_Signature, str]]
"""By path: the files of an adapter when they were read, and their digest."""


class Adapters:
    """Identifies adapters by the content of their files. It reads files in a thread of its own.

    An adapter whose files change while the engine uses it is no longer identified: the engine may have the old weights or
    the new ones, and its prefix cache has blocks of the old weights under the same path.
    """

    def __init__(self, find: Callable[[str], str]) -> None:
        """``find`` returns the directory of an adapter's path, as the engine does. It may block for long."""
        self._find = find
        self._link: _adapter.Link[_Known] = _adapter.Link("penstock: LoRA adapters", dict, retry=0, log=_log)
        self._changed: set[str] = set()  # paths, for the thread
        self._paths: dict[int, str] = {}  # by number: the path that the engine has loaded

    def digest(self, lora: Any) -> Future[str]:
        """Begin to identify the adapter of a LoRARequest. The result is an InvalidError if it cannot be identified."""
        number, path = int(lora.lora_int_id), str(lora.lora_path)
        if self._paths.setdefault(number, path) != path:
            if not lora.load_inplace:
                failed: Future[str] = Future()
                failed.set_exception(
                    errors.InvalidError(
                        f"adapter {lora.lora_name!r} has the number {number} of the adapter at {self._paths[number]}, whose weights the"
                        " engine goes on using: give each adapter a number of its own"
                    )
                )
                return failed
            self._paths[number] = path
        return self._link.call(lambda known: self._digest(known, path))

    def close(self) -> None:
        self._link.close()

    def _digest(self, known: _Known, path: str) -> str:
        try:
            files = self._files(path)
            now = _signature(files)
            signature, digest = known.get(path, (None, None))
            if path not in self._changed and (digest is None or signature != now):
                read = _content(files)
                if _signature(files) != now or digest not in (None, read):
                    self._changed.add(path)
                known[path] = now, (digest := read)
        except errors.InvalidError:
            raise
        except Exception as e:  # an error of the file system, or of the hub that find uses
            raise errors.InvalidError(f"the LoRA adapter at {path} cannot be read: {e}") from e
        if path in self._changed or digest is None:
            raise errors.InvalidError(
                f"the files of the LoRA adapter at {path} have changed while the engine used them: write new weights to another path"
            )
        return digest

    def _files(self, path: str) -> list[str]:
        directory = self._find(path)
        files = sorted(entry.path for entry in os.scandir(directory) if entry.name.startswith("adapter_") and entry.is_file())
        if not any(os.path.basename(file).startswith("adapter_model.") for file in files):
            raise errors.InvalidError(f"the LoRA adapter at {path} has no file adapter_model.* that would identify it")
        return files


def _signature(files: list[str]) -> _Signature:
    """Return attributes that change when a file is replaced or written to."""
    stats = [os.stat(file) for file in files]
    return tuple((file, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in zip(files, stats, strict=True))


def _content(files: list[str]) -> str:
    """Return a digest of the names and the contents of files."""
    total = hashlib.sha256()
    for file in files:
        one = hashlib.sha256()
        with open(file, "rb") as f:
            while part := f.read(1 << 20):
                one.update(part)
        total.update(os.path.basename(file).encode() + b"\0" + one.digest())
    return total.hexdigest()


class Extras:
    """Makes the extras of a request's blocks. Callers call ``ready`` until it returns true, and then call ``of`` once."""

    def __init__(
        self,
        keys: Callable[[Any, int, int], tuple[Any, ...] | None],
        adapters: Adapters | None,
        lora: tuple[object, ...] = (),
        *,
        images: bool = True,
        timeout: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keys`` returns vLLM's own keys of a block. ``lora`` are the options that determine the KV of all adapters in
        this engine.

        ``images`` is whether the engine identifies images by their content. ``timeout`` bounds the time that a request
        waits for its adapter's files, in seconds.
        """
        self._keys = keys
        self._adapters = adapters
        self._lora = lora
        self._images = images
        self._timeout = timeout
        self._clock = clock
        self._waiting: dict[str, tuple[Future[str], float]] = {}  # by request
        self._encoders: dict[str, str | None] = {}  # by name: the path of the adapter that has encoded images; None: of several

    def ready(self, request: Any) -> bool:
        """Return whether ``of`` can be called. The first call begins to read the files of the request's adapter."""
        if request.lora_request is None or self._adapters is None:
            return True
        if request.request_id not in self._waiting:
            self._waiting[request.request_id] = self._adapters.digest(request.lora_request), self._clock() + self._timeout
        digest, until = self._waiting[request.request_id]
        return digest.done() or self._clock() >= until

    def of(self, request: Any) -> Extra | None:
        """Return the extras of a request, or None if its tokens alone determine its KV.

        Raises InvalidError if other processes could not compute the same extras.
        """
        named = {image.identifier: image.mm_hash for image in request.mm_features if image.mm_hash not in (None, image.identifier)}
        encoder = not named or self._one_encoder(request.lora_request)
        adapter = self.adapter(request)
        if not encoder:
            raise errors.InvalidError(
                f"an earlier adapter had the name {request.lora_request.lora_name!r} and another path, and the engine may have its"
                " encodings of the request's images: with enable_tower_connector_lora, give each adapter a name of its own"
            )
        if request.mm_features and not self._images:
            raise errors.InvalidError(
                "without its prefix cache and its cache of processed images, the engine numbers images and does not hash them:"
                " set mm_processor_cache_gb above 0"
            )
        if adapter is None and not request.cache_salt and not request.mm_features and request.prompt_embeds is None:
            return None

        def extra(start: int, end: int) -> object:
            # vLLM's key of the adapter has its name and path.
            own = (key for key in self._keys(request, start, end) or () if key[0] != "lora")
            keys = tuple((key[0], named.get(key[1], key[1]), *key[2:]) if key[0] == "mm" else key for key in own)
            return (adapter, keys) if adapter is not None or keys else None

        return extra

    def _one_encoder(self, lora: Any) -> bool:
        """Return whether all images that were encoded under the adapter's name so far were encoded by that adapter."""
        if self._encoders.setdefault(lora.lora_name, lora.lora_path) != lora.lora_path:
            self._encoders[lora.lora_name] = None
        return self._encoders[lora.lora_name] is not None

    def adapter(self, request: Any) -> tuple[object, ...] | None:
        """Return what determines the KV of the request's adapter, or None without one. It raises as ``of`` does.

        Callers call it once, instead of ``of``.
        """
        if request.lora_request is None:
            return None
        if self._adapters is None:
            raise errors.InvalidError("a request has a LoRA adapter, and the engine's configuration has no LoRA")
        digest, _ = self._waiting.pop(request.request_id)
        if not digest.done():
            raise errors.InvalidError(
                f"the files of the LoRA adapter at {request.lora_request.lora_path} were not read within {self._timeout:g} s"
            )
        return (digest.result(), request.lora_request.is_3d_lora_weight, *self._lora)

    def forget(self, request: Any) -> None:
        """Remove the state of a request that has ended."""
        self._waiting.pop(request.request_id, None)

    def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
