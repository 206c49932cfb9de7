"""Kernels compiled by other processes: what is recorded, what a process is started for, and what comes of it.

Real kernels take a minute to compile; here a stand-in for the process tells what it was asked for.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lazyweights.container import first_run, gguf_sample
from lazyweights.container.decoder import decode_file
from lazyweights.container.encoder import encode_file
from lazyweights.container.gguf_scan import scan_gguf
from tests.make_gguf import build_gguf

REPOSITORY = Path(__file__).resolve().parents[2]

ECHO = """
import sys
from pathlib import Path
notes = Path({notes!r})
with open(notes, "a") as file:
    print(*sys.argv[1:3], file=file)
n = len(notes.read_text().splitlines())
print(f"kernel {{n}}", flush=True)
{then}
"""

KERNELS = """
from numba import njit

@njit(cache=True)
def one(x):
    return x + 1

@njit(cache=True)
def two(x):
    return one(x) + 1

@njit(cache=True)
def three(x):
    return x + 3
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing tried yet, and a cache of its own."""
    monkeypatch.setattr(first_run, "_tried", set())
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make the process run a text instead; returns what it notes: the work and the file of each process."""
    notes = tmp_path / "notes"
    notes.touch()

    def put(then: str = "") -> Path:
        folder = tmp_path / "modules"
        folder.mkdir(exist_ok=True)
        body = ECHO.format(notes=str(notes), then=then).replace("\n", "\n    ")
        (folder / "stand_in.py").write_text(f"def main():\n    {body}\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(first_run, "_PROCESS", "stand_in")
        return notes

    return put


def forget() -> None:
    """As in another process."""
    first_run._tried.clear()


def test_each_work_is_done_once(stand_in) -> None:
    notes = stand_in()
    assert not first_run.is_compiled(first_run.DECODE)
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    forget()
    assert first_run.is_compiled(first_run.DECODE)
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert notes.read_text() == f"decode {os.path.abspath('m.lw')}\n"
    assert not first_run.is_compiled(first_run.ENCODE)


def test_who_encodes_can_decode(stand_in) -> None:
    stand_in()
    first_run.compile_kernels(first_run.ENCODE, "m.gguf")
    forget()
    assert first_run.is_compiled(first_run.DECODE)


def test_a_pipe_is_not_looked_at(stand_in) -> None:
    notes = stand_in()
    first_run.compile_kernels(first_run.DECODE, None)
    assert notes.read_text() == "encode \n"


def test_processes_follow_each_other_until_all_is_compiled(stand_in) -> None:
    notes = stand_in("sys.exit(4 if n < 3 else 0)")
    kernels: list[str] = []
    first_run.compile_kernels(first_run.DECODE, "m.lw", kernels.append)
    assert kernels == ["kernel 1", "kernel 2", "kernel 3"]
    assert len(notes.read_text().splitlines()) == 3


def test_processes_that_come_to_no_end_do(stand_in) -> None:
    notes = stand_in("sys.exit(4)")
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert len(notes.read_text().splitlines()) == first_run.MAX_PROCESSES


def test_a_process_that_fails_is_not_tried_again(stand_in, caplog: pytest.LogCaptureFixture) -> None:
    notes = stand_in("raise ValueError('no compiler')")
    with caplog.at_level("INFO"):
        first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert "ended with code 1" in caplog.text
    assert "no compiler" in caplog.text
    forget()
    assert first_run.is_compiled(first_run.DECODE)
    assert len(notes.read_text().splitlines()) == 1


def test_a_bad_file_says_nothing_of_others(stand_in) -> None:
    stand_in(f"sys.exit({first_run.BAD_FILE})")
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    forget()
    assert not first_run.is_compiled(first_run.DECODE)


@pytest.mark.parametrize("executable", [None, "", "/opt/application", "/nowhere/python3"])
def test_without_an_interpreter_the_caller_compiles(executable, stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = stand_in()
    monkeypatch.setattr(sys, "executable", executable)
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert notes.read_text() == ""
    assert first_run.is_compiled(first_run.DECODE)  # is not tried again by this process


def test_a_frozen_application_does_not_start_itself(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = stand_in()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert notes.read_text() == ""


def test_an_interruption_ends_the_process(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in("import time; time.sleep(600)")
    started: list[subprocess.Popen] = []
    plain = subprocess.Popen

    def note(*args, **options) -> subprocess.Popen:
        started.append(plain(*args, **options))
        return started[-1]

    def interrupt(kernel: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", note)
    with pytest.raises(KeyboardInterrupt):
        first_run.compile_kernels(first_run.DECODE, "m.lw", interrupt)
    assert [process.returncode for process in started] == [-9]
    forget()
    assert not first_run.is_compiled(first_run.DECODE)


def test_a_folder_that_cannot_be_written(stand_in, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = stand_in()
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    assert notes.read_text() != ""
    forget()
    assert not first_run.is_compiled(first_run.DECODE)


@pytest.mark.parametrize("change", ["code", "settings", "processor"])
def test_what_makes_kernels_invalid_makes_the_record_invalid(change, stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in()
    first_run.compile_kernels(first_run.DECODE, "m.lw")
    forget()
    if change == "code":
        monkeypatch.setattr(first_run, "_stamp", lambda status: f"{status.st_size} 0")
    elif change == "settings":
        monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    else:
        monkeypatch.setattr(first_run, "_processor", lambda: iter(["another"]))
    assert not first_run.is_compiled(first_run.DECODE)


def test_the_record_stays_short(stand_in, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in()
    for i in range(first_run.MAX_LINES):
        monkeypatch.setattr(first_run, "_processor", lambda i=i: iter([str(i)]))
        first_run._write_record([first_run.ENCODE, first_run.DECODE])
    lines = (tmp_path / "cache" / first_run.RECORD).read_text().splitlines()
    assert len(lines) == first_run.MAX_LINES
    assert first_run.is_compiled(first_run.ENCODE)


def test_a_record_can_be_read_without_numba() -> None:
    code = "import sys; from lazyweights.container import first_run as f; f.is_compiled('encode'); print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_process_stops_at_its_limit_and_the_next_goes_on(tmp_path: Path) -> None:
    """The guard on three small kernels: with no memory at all, each process compiles one."""
    package = tmp_path / "lazyweights_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "small.py").write_text(KERNELS)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from numba.core import event\n"
        "from lazyweights.container import compile_process\n"
        "compile_process._PACKAGE = 'lazyweights_kernels.'\n"
        "event.register('numba:compile', compile_process.MemoryGuard(int(sys.argv[2])))\n"
        "from lazyweights_kernels import small\n"
        "assert (small.two(1), small.three(1)) == (3, 4)\n"
    )
    found = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), "1"], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        found.append((done.returncode, done.stdout.split()))
    assert found == [(first_run.MORE, ["small.one", "small.two"]), (0, ["small.three"]), (0, [])]


def test_a_sample_has_rows_of_each_type(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    q8 = rng.integers(0, 256, 4 * 34 * 600, np.uint8).tobytes()
    f32 = rng.integers(0, 256, 4 * 128, np.uint8).tobytes()
    source = tmp_path / "m.gguf"
    source.write_bytes(build_gguf([("w", 8, (128, 600), q8), ("norm", 0, (128,), f32)]))
    pieces = gguf_sample.sample_file(source)
    assert [(p.type_id, p.shape) for p in pieces] == [(8, (128, 512)), (0, (128, 1))]
    assert [p.data for p in pieces] == [q8[: 512 * 4 * 34], f32]


def test_the_sample_of_common_types_is_coded_and_comes_back(tmp_path: Path) -> None:
    pieces = gguf_sample.sample_common_types()
    sample, coded, back = tmp_path / "s.gguf", tmp_path / "s.lw", tmp_path / "back.gguf"
    gguf_sample.write_sample(pieces, sample)
    data = sample.read_bytes()
    scan = scan_gguf(data)
    assert scan.problem is None
    assert [(t.type_id, t.shape) for t in scan.tensors] == [(p.type_id, p.shape) for p in pieces]
    encode_file(sample, coded, threads=1)
    assert coded.stat().st_size < 0.8 * len(data)  # where codes are stored raw no kernel runs
    decode_file(coded, back, threads=1)
    assert back.read_bytes() == data
