"""GGUF files written again: metadata and kept tensors byte for byte, replaced ones as they were made."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from lazyweights.blocks.types import TYPE_BY_NAME
from lazyweights.container.gguf_scan import read_metadata, scan_gguf
from lazyweights.errors import BlockLayoutError, FormatError, LazyWeightsError, OutputExistsError, VersionError
from lazyweights.quant.gguf_rewrite import string_pair, u32_pair, write_gguf
from tests.make_gguf import Tensor, build_gguf, pack_header, pack_pair, plausible_metadata, random_tensor_bytes

F16, F32, Q4_0, Q8_0 = (TYPE_BY_NAME[name].type_id for name in ("F16", "F32", "Q4_0", "Q8_0"))


def sample(alignment: int = 32) -> tuple[list[Tensor], bytes]:
    """Three tensors of odd sizes, and the file of them."""
    rng = np.random.default_rng(3)
    tensors: list[Tensor] = [
        (name, type_id, shape, random_tensor_bytes(type_id, shape, rng))
        for name, type_id, shape in (
            ("a.weight", F16, (64, 5)), ("b.norm", F32, (7,)), ("c.weight", Q8_0, (32, 3, 2)),
        )
    ]  # fmt: skip
    return tensors, build_gguf(tensors, plausible_metadata(), alignment=alignment, tail=b"behind the end")


def tensors_of(path: Path) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    scan = scan_gguf(data)
    assert scan.problem is None
    return {t.name: (t.type_id, t.shape, data[t.offset : t.offset + t.n_bytes]) for t in scan.tensors}


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_nothing_replaced_is_the_source_without_its_tail(tmp_path: Path, alignment: int) -> None:
    _, data = sample(alignment)
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(data)
    result = write_gguf(source, output, {})
    assert output.read_bytes() == data.removesuffix(b"behind the end")
    assert (result.n_replaced, result.output_bytes) == (0, output.stat().st_size)
    assert result.n_weights == 64 * 5 + 7 + 32 * 3 * 2


def test_replaced_and_added_tensors(tmp_path: Path) -> None:
    tensors, data = sample()
    rng = np.random.default_rng(4)
    new_a, new_d = random_tensor_bytes(Q4_0, (64, 5), rng), rng.standard_normal((3, 4)).astype("<f4")
    called = []

    def make_a() -> tuple[int, tuple[int, ...], Iterator[bytes | np.ndarray]]:
        called.append("a")
        return Q4_0, (64, 5), iter([new_a[:50], np.frombuffer(new_a[50:], "<u2")[:0], bytearray(new_a[50:])])

    steps: list[tuple[int, int, str]] = []
    output = tmp_path / "out.gguf"
    result = write_gguf(
        data, output, {"d.weight": lambda: (F32, (4, 3), [new_d[:2], new_d[2:]]), "a.weight": make_a},
        new_shapes={"d.weight": (4, 3)}, progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert called == ["a"]
    assert tensors_of(output) == {
        "a.weight": (Q4_0, (64, 5), new_a),
        **{name: (type_id, shape, kept) for name, type_id, shape, kept in tensors[1:]},
        "d.weight": (F32, (4, 3), new_d.tobytes()),
    }
    assert read_metadata(output.read_bytes()) == read_metadata(data)
    assert (result.n_replaced, len(result.tensors)) == (2, 4)
    assert steps == [(0, 4, "a.weight"), (1, 4, "b.norm"), (2, 4, "c.weight"), (3, 4, "d.weight"), (4, 4, "")]
    reader = gguf.GGUFReader(output)  # the package's own reader agrees
    assert [t.name for t in reader.tensors] == ["a.weight", "b.norm", "c.weight", "d.weight"]
    assert reader.tensors[0].data.tobytes() == new_a


def test_order_of_writing_does_not_follow_odd_offsets(tmp_path: Path) -> None:
    head = pack_header(2, 0)
    for name, offset in (("x", 64), ("y", 0)):
        head += struct.pack("<Q1sIQIQ", 1, name.encode(), 1, 8, F32, offset)
    body = bytes(range(32)) + b"\xaa" * 32 + bytes(range(100, 132))
    output = tmp_path / "out.gguf"
    write_gguf(head + bytes(-len(head) % 32) + body, output, {})
    assert [(t.name, t.offset) for t in scan_gguf(output.read_bytes()).tensors] == [("x", 96), ("y", 128)]
    assert tensors_of(output)["y"][2] == bytes(range(32))


def test_pairs_are_set_in_place_added_and_dropped(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "general.file_type": 1, "quantize.imatrix.file": "x", "quantize.x": 2}
    output = tmp_path / "out.gguf"
    write_gguf(
        build_gguf([], metadata), output, {}, drop_pairs=["quantize.imatrix.", "quantize."[:-1]],
        pairs={"new.name": string_pair("tür"), "general.file_type": u32_pair(7)},
    )  # fmt: skip
    expected = pack_header(0, 4)
    for key, value in (
        ("general.architecture", "llama"), ("general.file_type", 7), ("quantize.x", 2), ("new.name", "tür"),
    ):  # fmt: skip
        expected += pack_pair(key, value)
    assert output.read_bytes() == expected + bytes(-len(expected) % 32)


def test_alignment_stays(tmp_path: Path) -> None:
    _, data = sample(64)
    for options in ({"pairs": {"general.alignment": u32_pair(8)}}, {"drop_pairs": ["general.alignment"]}):
        with pytest.raises(ValueError, match="alignment"):
            write_gguf(data, tmp_path / "out.gguf", {}, **options)  # type: ignore[arg-type]
    write_gguf(data, tmp_path / "out.gguf", {}, drop_pairs=["general."])
    kept = read_metadata((tmp_path / "out.gguf").read_bytes())
    assert [key for key in kept if key.startswith("general.")] == ["general.alignment"]
    assert scan_gguf((tmp_path / "out.gguf").read_bytes()).problem is None


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ((F16, (64, 5), [bytes(639)]), "expected 640, found 639"),
        ((F16, (64, 5), [bytes(640), b"x"]), "expected 640, found 641"),
        ((Q8_0, (48, 5), []), "not whole blocks of Q8_0"),
        ((F16, (64, 5, 1), [bytes(640)]), "number of dimensions"),
        ((4, (64, 5), []), "type 4 is not known"),
        ((F16, (64, 0), []), "not whole blocks"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, new: tuple, said: str) -> None:
    _, data = sample()
    with pytest.raises(BlockLayoutError, match=said) as caught:
        write_gguf(data, tmp_path / "out.gguf", {"a.weight": lambda: new})
    assert caught.value.tensor == "a.weight"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("replaced", "shapes", "said"),
    [
        ("x", {}, "no tensor of this name to replace"),
        ("a.weight", {"b.norm": (7,)}, "there already"),
        ("a.weight", {"x": (7,)}, "nothing makes"),
        ("x", {"x": ()}, "1 to 4 dimensions"),
        ("x", {"x": (2, 320)}, "not the one announced"),
    ],
)
def test_names_must_agree(tmp_path: Path, replaced: str, shapes: dict, said: str) -> None:
    _, data = sample()
    with pytest.raises(BlockLayoutError, match=said):
        write_gguf(data, tmp_path / "out.gguf", {replaced: lambda: (F16, (64, 5), [bytes(640)])}, new_shapes=shapes)
    assert list(tmp_path.iterdir()) == []


def test_errors_of_a_maker_leave_nothing(tmp_path: Path) -> None:
    def fail() -> tuple:
        raise LazyWeightsError("no")

    with pytest.raises(LazyWeightsError, match="no"):
        write_gguf(sample()[1], tmp_path / "out.gguf", {"b.norm": fail})
    assert list(tmp_path.iterdir()) == []


def test_sources_that_cannot_be_copied(tmp_path: Path) -> None:
    tensors, data = sample()
    output = tmp_path / "out.gguf"
    for bad, kind in (
        (build_gguf(tensors, version=1), VersionError),
        (build_gguf(tensors, byte_order="big"), VersionError),
        (data[:-200], FormatError),
        (b"GGML", FormatError),
    ):
        with pytest.raises(kind):
            write_gguf(bad, output, {})
    path = tmp_path / "short.gguf"
    path.write_bytes(data[:-200])
    with pytest.raises(FormatError, match="missing from the file") as caught:
        write_gguf(path, output, {})
    assert caught.value.path == str(path)
    path.write_bytes(b"")
    with pytest.raises(FormatError, match="empty"):
        write_gguf(path, output, {})
    assert not output.exists()


def test_outputs_are_not_replaced_without_force(tmp_path: Path) -> None:
    _, data = sample()
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(data)
    output.write_bytes(b"old")
    with pytest.raises(OutputExistsError):
        write_gguf(source, output, {})
    with pytest.raises(OutputExistsError, match="input itself"):
        write_gguf(source, source, {}, force=True)
    assert output.read_bytes() == b"old"
    write_gguf(source, output, {}, force=True)
    assert output.read_bytes() == data.removesuffix(b"behind the end")
