"""Sizes that zstd and xz reach, verified and remembered: at their highest levels they take minutes.

A size depends on the input and the peer's version alone, so it is kept under the input's SHA-256: in the JSON of the
benchmark, and at once in .cache/bench, so that a run that was stopped is continued.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zstandard
from common import COPY_BYTES, QUICK_RESULTS, console, verify
from tables import RESULTS

ZSTD_VERSION = ".".join(map(str, zstandard.ZSTD_VERSION))
LOCAL_SIZES = QUICK_RESULTS / "peer_sizes.json"
Buffer = Any
"""Anything that has a memoryview."""


def label(peer: str) -> str:
    """Name of a peer with what decides its output.

    >>> label("xz -9")
    'xz -9'
    """
    return f"{peer}, libzstd {ZSTD_VERSION}" if peer.startswith("zstd") else peer


def packed_bytes(peer: str, data: Buffer) -> int:
    """Compress with ``zstd -N`` or ``xz -N``, decompress, compare, and return the size."""
    tool, level = peer.split(" -")
    with memoryview(data) as view:
        if tool == "zstd":
            packed = zstandard.ZstdCompressor(level=int(level), write_checksum=True).compress(view)
        else:
            packed = lzma.compress(view, preset=int(level))
        at = 0
        for block in _unpack(tool, packed):
            verify(view[at : at + len(block)] == block, peer)
            at += len(block)
        verify(at == len(view), peer)
    return len(packed)


def _unpack(tool: str, packed: bytes) -> Iterator[bytes]:
    if tool == "zstd":
        yield from zstandard.ZstdDecompressor().read_to_iter(packed, write_size=COPY_BYTES)
        return
    with lzma.open(io.BytesIO(packed)) as file:
        while block := file.read(COPY_BYTES):
            yield block


class SizeCache:
    """Sizes by the SHA-256 of the input and the label of the peer.

    Parameters
    ----------
    name : str
        Benchmark whose JSON carries the sizes.

    Attributes
    ----------
    used : dict
        What this run asked for: what belongs into the JSON.
    """

    def __init__(self, name: str) -> None:
        self.used: dict[str, dict[str, int]] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._lock = threading.Lock()
        for path in (RESULTS / f"{name}.json", LOCAL_SIZES):
            if path.is_file():
                for sha256, known in json.loads(path.read_text()).get("peer_sizes", {}).items():
                    self._known.setdefault(sha256, {}).update(known)

    def measure(self, inputs: Mapping[str, Buffer], peers: Iterable[str]) -> dict[str, dict[str, int]]:
        """Return the sizes of each input by peer; what is not known yet is computed, on all cores."""
        peers = list(peers)
        digests = {key: hashlib.sha256(data).hexdigest() for key, data in inputs.items()}
        todo = [(k, p) for k in inputs for p in peers if label(p) not in self._known.get(digests[k], {})]

        def run(task: tuple[str, str]) -> None:
            key, peer = task
            size = packed_bytes(peer, inputs[key])
            console.print(f"{key}: {peer} gives {size:,} bytes")
            with self._lock:
                self._known.setdefault(digests[key], {})[label(peer)] = size
                LOCAL_SIZES.parent.mkdir(parents=True, exist_ok=True)
                LOCAL_SIZES.write_text(json.dumps({"peer_sizes": self._known}))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(run, todo))
        for digest in digests.values():
            known = self._known[digest]
            self.used.setdefault(digest, {}).update({label(peer): known[label(peer)] for peer in peers})
        return {key: {peer: self._known[digests[key]][label(peer)] for peer in peers} for key in inputs}
