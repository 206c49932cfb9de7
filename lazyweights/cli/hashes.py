"""``inspect --hash``: SHA-256 of every tensor and of the file, as ``sha256  HEX  file:tensor`` lines."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator

from lazyweights.cli.messages import printable, say_warning


def print_hashes(path: str, kind: str) -> None:
    """Print a line for each tensor, then one for the file.

    A coded file gets the lines of its source: its tensors decoded, the source's SHA-256, and the source's name where
    it follows from that of the coded file. So the lines of a GGUF file and of its coded file are the same.

    Parameters
    ----------
    path : str
    kind : str
        ``gguf`` or ``coded``.
    """
    name = path.removesuffix(".lw") if kind == "coded" else path
    lines = _hash_coded(path) if kind == "coded" else _hash_gguf(path)
    for tensor, digest in lines:
        print(f"sha256  {digest}  {printable(name if tensor is None else f'{name}:{tensor}')}")


def _hash_gguf(path: str) -> Iterator[tuple[str | None, str]]:
    from lazyweights.container.gguf_scan import scan_gguf

    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        scan = scan_gguf(data)
        spans = {span.tensor: span for span in scan.spans if span.tensor is not None}
        with memoryview(data) as view:
            for index, tensor in enumerate(scan.tensors):
                span = spans.get(index)
                if span is not None:
                    with view[span.offset : span.offset + span.n_bytes] as part:
                        yield tensor.name, hashlib.sha256(part).hexdigest()
            if len(spans) < len(scan.tensors):
                n_left = len(scan.tensors) - len(spans)
                say_warning(f"{path}: no line for {n_left} tensors whose bytes are not known ({scan.problem})")
            yield None, hashlib.sha256(view).hexdigest()


def _hash_coded(path: str) -> Iterator[tuple[str | None, str]]:
    import lazyweights

    with lazyweights.open(path) as coded:
        for name in coded.keys():  # noqa: SIM118 - a CodedFile is no mapping
            yield name, hashlib.sha256(coded.get_tensor(name).data).hexdigest()
    yield None, lazyweights.verify(path).sha256
