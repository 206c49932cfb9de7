"""Memory files: the source's bytes, errors as they should be, nothing left."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyweights.container.decoder import iter_decoded, iter_placed, load_kernels
from lazyweights.errors import BackendUnavailableError, CodecError, FormatError, LazyWeightsError, NotCodedError
from lazyweights.llama.memory_file import is_coded_file, model_path

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous memory files")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors are not listed")


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, threads = len(descriptors()), threading.active_count()
    yield
    assert len(descriptors()) == before
    assert threading.active_count() == threads


@linux
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_bytes_are_those_of_the_source(tiny: Path, tiny_coded: Path, threads: int, whole: bool) -> None:
    seen: list[int] = []
    with model_path(tiny_coded, threads=threads, whole=whole, progress=lambda p: seen.append(p.n_bytes)) as found:
        assert found.is_coded
        assert found.n_bytes == tiny.stat().st_size
        assert (found.seconds > 0) == whole
        file = open(found.path, "rb")  # noqa: SIM115
        header = file.read(4)
        if whole:
            assert Path(found.path).read_bytes() == tiny.read_bytes()
    assert found.seconds > 0
    assert header == b"GGUF"
    assert not os.path.exists(found.path)
    with file:  # what was opened stays usable
        assert header + file.read() == tiny.read_bytes()
    assert seen == sorted(seen)
    assert seen[-1] == tiny.stat().st_size


@linux
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_path_cannot_be_written(tiny_coded: Path) -> None:
    with model_path(tiny_coded) as found, pytest.raises(PermissionError):
        Path(found.path).write_bytes(b"")


def test_gguf_is_its_own_path(tiny: Path) -> None:
    with model_path(tiny) as found:
        assert (found.path, found.is_coded, found.fd) == (str(tiny), False, -1)
    assert tiny.is_file()


@linux
def test_damage_is_an_error_before_the_body(tiny_damaged: Path) -> None:
    with pytest.raises((FormatError, CodecError)) as caught, model_path(tiny_damaged):
        raise AssertionError("the body must not run")
    assert caught.value.path == str(tiny_damaged)
    assert caught.value.tensor is not None


@linux
def test_damage_is_an_error_at_the_end_of_an_early_body(tiny_damaged: Path) -> None:
    reached = False
    with pytest.raises((FormatError, CodecError)), model_path(tiny_damaged, whole=False):
        reached = True
    assert reached


@linux
@pytest.mark.parametrize("whole", [True, False])
def test_damaged_header_is_an_error_before_the_body(tiny_coded: Path, tmp_path: Path, whole: bool) -> None:
    data = bytearray(tiny_coded.read_bytes())
    data[200] ^= 1
    damaged = tmp_path / "d.lw"
    damaged.write_bytes(data)
    with pytest.raises(FormatError), model_path(damaged, whole=whole):
        raise AssertionError("the body must not run")


@linux
@pytest.mark.parametrize("whole", [True, False])
def test_error_of_the_body_goes_through(tiny_coded: Path, whole: bool) -> None:
    with pytest.raises(ZeroDivisionError), model_path(tiny_coded, whole=whole):
        raise ZeroDivisionError


def test_system_without_memory_files(tiny_coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(BackendUnavailableError, match="lazyweights decode"), model_path(tiny_coded):
        pass


@linux
def test_memory_runs_out(tiny_coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LazyWeightsError, match="no room for what is decoded: No space left"), model_path(tiny_coded):
        pass


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LazyWeightsError, match="cannot read"):
        is_coded_file(tmp_path / "none.lw")


@pytest.mark.parametrize("threads", [1, 3])
def test_iter_placed_gives_what_iter_decoded_gives(tiny_coded: Path, tmp_path: Path, threads: int) -> None:
    expected = b"".join(bytes(part) for part in iter_decoded(tiny_coded))
    with (tmp_path / "placed").open("w+b") as sink:
        states = list(iter_placed(tiny_coded, sink.fileno(), threads=threads))
        assert sink.read() == expected
    assert states[0].n_bytes == 0
    assert states[-1].n_bytes == states[-1].source_bytes == len(expected)
    assert 0 < states[0].header_bytes < len(expected)


def test_iter_placed_can_be_left(tiny_coded: Path, tmp_path: Path) -> None:
    with (tmp_path / "placed").open("w+b") as sink:
        parts = iter_placed(tiny_coded, sink.fileno(), threads=2)
        next(parts)
        parts.close()
        assert sink.read() == b""


def test_not_a_coded_file(tiny: Path, tmp_path: Path) -> None:
    with (tmp_path / "placed").open("w+b") as sink, pytest.raises(NotCodedError):
        list(iter_placed(tiny, sink.fileno()))
    with pytest.raises(NotCodedError):
        load_kernels(tiny)
