"""Imatrix files: round trips, the bytes of the legacy format, what the gguf package reads, and damage."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from lazyweights.errors import FormatError, OffsetError, OutputExistsError, TruncatedError, VersionError
from lazyweights.llama.capture import InputGroup
from lazyweights.llama.hessians import CaptureInfo, Hessians
from lazyweights.llama.imatrix import is_imatrix, mean_squares, read_imatrix, write_imatrix
from tests.make_gguf import build_gguf

PLAIN, EXPERTS, OUTPUT = "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "output.weight"
EXPERT_ROWS = np.array([300, 0, 724])


def known() -> Hessians:
    """Sums of a shared input, of experts of which one saw nothing, and of an output matrix; exact in float32."""
    groups = [
        InputGroup((PLAIN, "blk.0.attn_k.weight"), 4, 1, False),
        InputGroup((EXPERTS,), 2, 3, True),
        InputGroup((OUTPUT,), 4, 1, False, is_output=True),
    ]
    sums = {
        PLAIN: np.array([[1.5, 2, 1024, 0]]), EXPERTS: np.array([[300.0, 600], [0, 0], [724, 362]]),
        OUTPUT: np.array([[8.0, 4, 2, 1]]),
    }  # fmt: skip
    rows = {PLAIN: np.array([512]), EXPERTS: EXPERT_ROWS, OUTPUT: np.array([512])}
    dropped = {key: np.zeros_like(value) for key, value in rows.items()}
    return Hessians(CaptureInfo("diagonal", text="wiki.txt", n_ctx=512, n_chunks=1), groups, sums, rows, dropped)


def test_gguf_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, known(), process_output=True)
    back = Hessians.load(path)
    assert back.info == CaptureInfo("diagonal", text="wiki.txt", n_ctx=512, n_chunks=1)
    assert back.keys() == sorted([PLAIN, "blk.0.attn_k.weight", EXPERTS, OUTPUT])
    for name in back:
        assert np.array_equal(back[name], known()[name])
        assert np.array_equal(back.n_rows(name), known().n_rows(name))
    assert back[EXPERTS].shape == (3, 2)


def test_output_matrix_is_left_out_as_in_llama_imatrix(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "imatrix.gguf", known())
    assert OUTPUT not in Hessians.load(tmp_path / "imatrix.gguf")


def test_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, known())
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.type"] == "imatrix"
    assert fields["imatrix.datasets"] == ["wiki.txt"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (1, 512)  # 724 rows
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    assert tensors[f"{EXPERTS}.in_sum2"].shape.tolist() == [2, 3]
    assert tensors[f"{EXPERTS}.counts"].shape.tolist() == [1, 3]
    assert tensors[f"{EXPERTS}.counts"].data.reshape(-1).tolist() == EXPERT_ROWS.tolist()
    assert tensors[f"{PLAIN}.in_sum2"].data.reshape(-1).tolist() == [1.5, 2, 1024, 0]


def test_files_of_the_gguf_package_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "")
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["data/a.txt", "b.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 256)
    writer.add_tensor("x.weight.counts", np.array([[64.0], [32.0]], np.float32))
    writer.add_tensor("x.weight.in_sum2", np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Hessians.load(tmp_path / "imatrix.gguf")
    assert found.info == CaptureInfo("diagonal", text="a.txt, b.txt", n_ctx=256, n_chunks=7)
    assert found["x.weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.n_rows("x.weight").tolist() == [64, 32]


def test_bytes_of_the_legacy_format(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    write_imatrix(path, known(), "dat")

    def entry(name: bytes, calls: int, *values: float) -> bytes:
        return struct.pack(f"<i{len(name)}sii{len(values)}f", len(name), name, calls, len(values), *values)

    shared = (1.5 / 512, 2 / 512, 2.0, 0.0)  # mean squares times one call
    assert path.read_bytes() == (
        struct.pack("<i", 3)
        + entry(b"blk.0.attn_k.weight", 1, *shared)
        + entry(b"blk.0.attn_q.weight", 1, *shared)
        + entry(b"blk.0.ffn_up_exps.weight", 2, 2, 4, 2, 2, 2, 1)  # ones where nothing was seen; 724 rows are two calls
        + struct.pack("<ii8s", 1, 8, b"wiki.txt")
    )


def test_legacy_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    write_imatrix(path, known(), "dat", process_output=True)
    back = Hessians.load(path)
    assert back.info == CaptureInfo("diagonal", text="wiki.txt", n_ctx=512, n_chunks=1)
    for name in (PLAIN, OUTPUT):
        assert np.array_equal(back[name], known()[name])
        assert back.n_rows(name) == 512
    assert back.n_rows(EXPERTS) == 1024
    np.testing.assert_array_equal(back[EXPERTS] / 1024, [1, 2, 1, 1, 1, 0.5])


def test_legacy_files_may_end_after_the_entries(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(struct.pack("<ii1siif", 1, 1, b"a", 3, 1, 6.0))
    back = read_imatrix(path, chunk_size=100)
    assert (back["a"].tolist(), back.n_rows("a"), back.info.text) == ([600.0], 300, "")


def test_mean_squares_are_ones_where_nothing_was_seen() -> None:
    from lazyweights.llama.imatrix import Entry

    entry = Entry(EXPERTS, np.array([[300.0, 600], [0, 0]]), np.array([300, 0]))
    assert mean_squares(entry).tolist() == [1, 2, 1, 1]


def test_diagonals_of_hessians_are_written(tmp_path: Path) -> None:
    group = InputGroup((PLAIN,), 2, 1, False)
    full = Hessians(
        CaptureInfo("hessian"), [group], {PLAIN: np.array([[[3.0, 1], [1, 2]]])}, {PLAIN: np.array([4])}, {PLAIN: np.array([0])}
    )
    write_imatrix(tmp_path / "imatrix.gguf", full)
    assert Hessians.load(tmp_path / "imatrix.gguf")[PLAIN].tolist() == [3, 2]
    with pytest.raises(OutputExistsError):
        write_imatrix(tmp_path / "imatrix.gguf", full)


def test_damaged_imatrix_files(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    write_imatrix(path, known(), "dat")
    data = path.read_bytes()
    for cut in (*range(0, 60), 100, len(data) - 20, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(FormatError):
            read_imatrix(path)
    for head in (struct.pack("<i", -1), struct.pack("<i", 1 << 30), struct.pack("<ii", 1, -5)):
        path.write_bytes(head + data)
        with pytest.raises(FormatError):
            read_imatrix(path)


def test_other_gguf_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    sums = ("a.in_sum2", 0, (2, 1), np.ones(2, "<f4").tobytes())
    path.write_bytes(build_gguf([sums], {"general.architecture": "llama"}))
    with pytest.raises(FormatError, match="no imatrix file"):
        Hessians.load(path)
    path.write_bytes(build_gguf([sums], {"general.type": "imatrix"}))
    with pytest.raises(FormatError, match="do not fit together"):
        Hessians.load(path)
    path.write_bytes(build_gguf([("a.in_sum2", 1, (2, 1), b"1234")], {"general.type": "imatrix"}))
    with pytest.raises(FormatError, match="not F32"):
        Hessians.load(path)
    path.write_bytes(build_gguf([], {"general.type": "imatrix"}))
    with pytest.raises(FormatError, match="no entries"):
        Hessians.load(path)


# Our own file.


def test_own_files_round_trip_and_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "diagonal"
    known().save(path)
    assert not is_imatrix(path)
    back = Hessians.load(path)
    assert back.info == known().info
    assert back.groups == known().groups
    for name in back:
        assert np.array_equal(back[name], known()[name])
        assert np.array_equal(back.n_rows(name), known().n_rows(name))
    assert isinstance(back[PLAIN].base, np.ndarray)
    assert not back[PLAIN].flags.writeable


def test_safetensors_package_reads_own_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    known().save(tmp_path / "diagonal")
    arrays = safetensors.load_file(tmp_path / "diagonal")
    assert np.array_equal(arrays[f"{EXPERTS}.squares"], known()[EXPERTS])
    assert np.array_equal(arrays[f"{EXPERTS}.rows"], EXPERT_ROWS)


def test_damaged_own_files(tmp_path: Path) -> None:
    path = tmp_path / "diagonal"
    known().save(path)
    data = path.read_bytes()
    n_header = int.from_bytes(data[:8], "little")

    def load(new: bytes) -> None:
        path.write_bytes(new)
        Hessians.load(path)

    for cut in (9, 100, 8 + n_header - 1):
        with pytest.raises(TruncatedError):
            load(data[:cut])
    with pytest.raises(OffsetError):
        load(data[:-1])
    with pytest.raises(FormatError, match="not that of a safetensors file"):
        load(data.replace(b'"dtype"', b'"dtyqe"', 1))
    with pytest.raises(FormatError, match="do not fit together"):
        load(data.replace(b'"shape":[1,4]', b'"shape":[1,5]', 1))
    with pytest.raises(FormatError, match="holds no activations"):
        load(data.replace(b"lazyweights.activations", b"lazyweights.activationz"))
    with pytest.raises(VersionError):
        load(data.replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(FormatError, match="description"):
        load(data.replace(b"n_columns", b"n_columnz"))
    with pytest.raises(FormatError, match="wrong shape"):
        load(data.replace(b'\\"n_columns\\": 2', b'\\"n_columns\\": 3'))
