"""What stops a command halfway leaves no output, and nothing that a loader would pick up."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.cli.conftest import model_bytes, run_process, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX signals and limits")

# The progress callback tells this test that the work is under way, and slows it down.
SLOW = """
import contextlib, sys, time
from lazyweights.cli import decode, encode
from lazyweights.cli.main import main

@contextlib.contextmanager
def slow_progress(name, enabled):
    def update(progress):
        print("busy", flush=True)
        time.sleep(0.05)
    yield update

encode.progress_bar = decode.progress_bar = slow_progress
sys.exit(main())
"""

LIMITED = """
import resource, sys
from lazyweights.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
sys.exit(main())
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """A model of many tensors, coded already, so that the kernels are compiled too."""
    folder = tmp_path_factory.mktemp("large")
    model = folder / "m.gguf"
    model.write_bytes(model_bytes(n_tensors=200, columns=256, rows=64))
    coded = folder / "m.gguf.lw"
    assert run_process("encode", "-q", model).code == 0
    return model, coded


def stop_when_busy(tmp_path, number, *argv):
    with start(*argv, "-T", 2, driver=SLOW, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    return process.returncode, err.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_signals_leave_nothing(tmp_path, large_model, number, code, verb):
    source = large_model[verb == "decode"]
    found, stderr = stop_when_busy(tmp_path, number, verb, source, "-o", "out")
    assert found == code
    assert "Traceback" not in stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_kill_leaves_nothing_that_looks_valid(tmp_path, large_model, verb):
    source = large_model[verb == "decode"]
    found, _ = stop_when_busy(tmp_path, signal.SIGKILL, verb, source, "-o", "out.gguf")
    assert found == -signal.SIGKILL
    for name in os.listdir(tmp_path):
        assert name.startswith(".out.gguf.")
        assert name.endswith(".part")


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits")
@pytest.mark.parametrize("verb", ["encode", "decode"])
def test_full_disk_leaves_nothing(tmp_path, large_model, verb):
    source = large_model[verb == "decode"]
    outcome = run_process(verb, source, "-o", "out", driver=LIMITED, cwd=tmp_path)
    assert outcome.code == 1
    assert outcome.stderr.startswith("lazyweights: ERROR out: cannot write: ")
    assert outcome.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == []
