"""Output files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from lazyweights.container import atomic
from lazyweights.container.atomic import AtomicFile, check_output, coded_name, remove_unfinished, source_name
from lazyweights.errors import LazyWeightsError, OutputExistsError


def test_file_appears_at_the_end(tmp_path):
    path = tmp_path / "m.gguf"
    with AtomicFile(path) as file:
        file.write(b"one")
        (part,) = os.listdir(tmp_path)
        assert part.startswith(".m.gguf.")
        assert part.endswith(".part")
        file.seek(0)
        assert file.read() == b"one"
        file.write(b" two")
    assert os.listdir(tmp_path) == ["m.gguf"]
    assert path.read_bytes() == b"one two"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, OSError])
@pytest.mark.parametrize("n_bytes", [0, 10, 3 << 20])
def test_any_exception_leaves_nothing_and_passes_through(tmp_path, error, n_bytes):
    def write():
        with AtomicFile(tmp_path / "out") as file:
            file.write(bytes(n_bytes))
            raise error

    with pytest.raises(error):
        write()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_exception_keeps_the_old_file(tmp_path, force):
    path = tmp_path / "out"
    path.write_bytes(b"old")

    def write():
        with AtomicFile(path, force) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError if force else OutputExistsError):
        write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]


def test_existing_output_needs_force(tmp_path):
    path = tmp_path / "out"
    path.write_bytes(b"old")
    with pytest.raises(OutputExistsError, match="use -f") as caught, AtomicFile(path):
        pytest.fail("entered")
    assert caught.value.path == str(path)
    with AtomicFile(path, force=True) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("can_link", [True, False])
def test_file_that_appears_meanwhile_is_kept(tmp_path, monkeypatch, can_link):
    if not can_link:
        refuse_links(monkeypatch)
    path = tmp_path / "out"

    def write():
        with AtomicFile(path) as file:
            file.write(b"ours")
            path.write_bytes(b"theirs")

    with pytest.raises(OutputExistsError):
        write()
    assert path.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["out"]


def refuse_links(monkeypatch, number=errno.EPERM):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_file_systems_without_links_get_a_rename(tmp_path, monkeypatch, number):
    refuse_links(monkeypatch, number)
    with AtomicFile(tmp_path / "out") as file:
        file.write(b"data")
    assert os.listdir(tmp_path) == ["out"]


def test_failing_link_is_an_error(tmp_path, monkeypatch):
    refuse_links(monkeypatch, errno.EIO)
    with pytest.raises(LazyWeightsError, match="cannot write: Input/output error"), AtomicFile(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["same", "hard", "soft", "chain", "dots"])
@pytest.mark.parametrize("force", [False, True])
def test_source_as_output_is_refused(tmp_path, kind, force):
    source = tmp_path / "source"
    source.write_bytes(b"precious")
    output = tmp_path / "other"
    if kind == "same":
        output = source
    elif kind == "hard":
        os.link(source, output)
    elif kind == "soft":
        output.symlink_to(source)
    elif kind == "chain":
        (tmp_path / "middle").symlink_to("source")
        output.symlink_to("middle")
    else:
        (tmp_path / "folder").mkdir()
        output = tmp_path / "folder" / ".." / "source"
    with pytest.raises(OutputExistsError, match="the input itself"), AtomicFile(output, force, source):
        pytest.fail("entered")
    assert source.read_bytes() == b"precious"


def test_source_that_becomes_the_output_meanwhile_is_kept(tmp_path):
    source, output = tmp_path / "source", tmp_path / "output"
    source.write_bytes(b"precious")

    def write():
        with AtomicFile(output, True, source) as file:
            file.write(b"new")
            os.link(source, output)

    with pytest.raises(OutputExistsError):
        write()
    assert source.read_bytes() == output.read_bytes() == b"precious"


def test_links_are_replaced_and_not_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    for _ in range(2):  # first a dangling link, then one to a file
        link.symlink_to(target)
        with pytest.raises(OutputExistsError), AtomicFile(link):
            pytest.fail("entered")
        with AtomicFile(link, force=True) as file:
            file.write(b"new")
        assert not link.is_symlink()
        assert link.read_bytes() == b"new"
        assert not target.exists() or target.read_bytes() == b"old"
        link.unlink()
        target.write_bytes(b"old")


def test_directories_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path, "a directory"), (tmp_path / "pipe", "regular"), (os.devnull, "regular")):
        with pytest.raises(OutputExistsError, match=reason), AtomicFile(path, force=True):
            pytest.fail("entered")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_mode_follows_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with AtomicFile(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o666 & ~umask


def test_missing_directory_and_file_as_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LazyWeightsError, match="nodir does not exist"), AtomicFile(tmp_path / "nodir" / "out"):
        pytest.fail("entered")
    with pytest.raises(LazyWeightsError, match="Not a directory"), AtomicFile(tmp_path / "file" / "out"):
        pytest.fail("entered")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(LazyWeightsError, match="Permission denied"), AtomicFile(tmp_path / "out"):
            pytest.fail("entered")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("n_bytes", [10, 3 << 20])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failing_write_leaves_nothing(tmp_path, monkeypatch, n_bytes, number):
    class Full(atomic._OutputFile):
        def write(self, data):
            raise atomic._cannot_write(self._output, OSError(number, os.strerror(number)))

    monkeypatch.setattr(atomic, "_OutputFile", Full)
    with pytest.raises(LazyWeightsError, match="cannot write") as caught, AtomicFile(tmp_path / "out") as file:
        file.write(bytes(n_bytes))
    assert caught.value.path == str(tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_raw_write_error_names_the_output():
    fd = os.open("/dev/full", os.O_RDWR)
    with (
        atomic._OutputFile(fd, "out") as raw,
        pytest.raises(LazyWeightsError, match=r"out: cannot write: .*disk is full"),
    ):
        raw.write(b"data")


def test_failing_flush_to_disk_leaves_nothing(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(LazyWeightsError, match="Input/output error"), AtomicFile(tmp_path / "out") as file:
        file.write(b"data")
    assert os.listdir(tmp_path) == []


def test_data_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    order = []
    fsync, link = os.fsync, os.link
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync " + kind(fd)), fsync(fd))[1])
    monkeypatch.setattr(os, "link", lambda *a, **k: (order.append("name"), link(*a, **k))[1])
    with AtomicFile(tmp_path / "out") as file:
        file.write(b"data")
    assert order == ["sync file", "name", "sync directory"]


def kind(fd):
    return "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"


def test_relative_and_long_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("out", "x" * 255, "\u2713" * 80, os.fsdecode(b"\xff.gguf")):
        with AtomicFile(name) as file:
            file.write(b"data")
        assert os.listdir() == [name]
        os.unlink(name)
    with pytest.raises(LazyWeightsError, match="File name too long"), AtomicFile("x" * 256) as file:
        file.write(b"data")
    assert os.listdir() == []


def test_remove_unfinished(tmp_path):
    file = AtomicFile(tmp_path / "out")
    file.__enter__().write(b"data")
    remove_unfinished()
    assert os.listdir(tmp_path) == []
    with pytest.raises(LazyWeightsError, match="cannot write"):
        file.__exit__(None, None, None)
    assert os.listdir(tmp_path) == []


def test_check_output_alone(tmp_path):
    check_output(tmp_path / "new")
    (tmp_path / "old").write_bytes(b"")
    with pytest.raises(OutputExistsError):
        check_output(tmp_path / "old")
    check_output(tmp_path / "old", force=True, source=tmp_path / "missing")


def test_names():
    assert coded_name("a/m.gguf") == "a/m.gguf.lw"
    assert source_name("a/m.gguf.lw") == "a/m.gguf"
    for name in ("m.gguf", ".lw", "a/.lw", "m.lw/x"):
        with pytest.raises(LazyWeightsError, match="does not end in"):
            source_name(name)
