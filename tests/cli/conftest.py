"""A small model, and the command line run in this process or in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lazyweights.blocks.types import TYPE_BY_NAME
from lazyweights.cli.main import main
from tests.make_gguf import build_gguf

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left."""

    code: int
    stdout: bytes
    stderr: str

    @property
    def text(self) -> str:
        return self.stdout.decode()


def skewed_q8_0(columns: int, rows: int, seed: int) -> tuple[int, tuple[int, ...], bytes]:
    """A Q8_0 tensor whose codes a coder shrinks: small numbers, one scale."""
    rng = np.random.default_rng(seed)
    blocks = np.zeros((rows * columns // 32, 34), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks[:, 2:] = np.clip(rng.normal(0, 6, (len(blocks), 32)), -127, 127).astype(np.int8).view(np.uint8)
    return TYPE_BY_NAME["Q8_0"].type_id, (columns, rows), blocks.tobytes()


def model_bytes(n_tensors: int = 2, columns: int = 256, rows: int = 64, seed: int = 1) -> bytes:
    """A GGUF file of a few Q8_0 tensors and a norm."""
    rng = np.random.default_rng(seed)
    tensors = [(f"blk.{i}.ffn_up.weight", *skewed_q8_0(columns, rows, seed + i)) for i in range(n_tensors)]
    norm = rng.standard_normal(columns).astype("<f4").tobytes()
    metadata = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(40)],
        "test.infinity": float("inf"),
    }
    return build_gguf([*tensors, ("output_norm.weight", 0, (columns,), norm)], metadata)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small GGUF file, alone in its directory."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes())
    return path


@pytest.fixture
def lw(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Outcome]:
    """Run the command line in this process."""

    def run(*argv: object) -> Outcome:
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capfdbinary.readouterr()
        stderr = captured.err.decode()
        assert "Traceback" not in stderr
        return Outcome(code, captured.out, stderr)

    return run


@pytest.fixture
def coded(model: Path, lw: Callable[..., Outcome]) -> Path:
    """The coded file of `model`, beside it."""
    assert lw("encode", "-q", model).code == 0
    return model.with_name("m.gguf.lw")


def environment() -> dict[str, str]:
    """The environment for another Python process, with the checkout on its path."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def start(*argv: object, driver: str | None = None, **options: object) -> subprocess.Popen[bytes]:
    """Start the command line in another process, or a driver script with the same arguments."""
    head = ["-m", "lazyweights"] if driver is None else ["-c", driver]
    command = [sys.executable, *head, *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment(), **pipes)  # type: ignore[call-overload,no-any-return]


def run_process(*argv: object, driver: str | None = None, data: bytes | None = None, **options: object) -> Outcome:
    """Run the command line in another process to its end."""
    stdin = subprocess.DEVNULL if data is None else subprocess.PIPE
    with start(*argv, driver=driver, stdin=stdin, **options) as process:
        out, err = process.communicate(data, timeout=300)
    stderr = err.decode()
    assert "Traceback" not in stderr
    return Outcome(process.returncode, out or b"", stderr)
