"""``lazyweights exec``: paths, exit codes, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import model_bytes, run_process, start

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous memory files")

COPY = "import shutil, sys; shutil.copyfile(sys.argv[1], sys.argv[2])"
WAIT = """
import signal, sys, time
def stop(number, frame):
    print("got", number, flush=True)
    sys.exit(5)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, stop)
print(sys.argv[1], open(sys.argv[1], "rb").read(4), flush=True)
time.sleep(60)
"""


ON_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from lazyweights.cli.main import main
sys.exit(main())
"""
COUNT = """
import signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.5)
print("got", len(got), flush=True)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The directory for temporary files, empty; it has to be afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    assert os.listdir(folder) == []


def test_program_reads_the_source(lw, model, coded, tmp_path):
    copy = tmp_path / "copy.gguf"
    outcome = lw("exec", coded, "--", sys.executable, "-c", COPY, "{}", copy)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert copy.read_bytes() == model.read_bytes()


def test_places(coded, temporary):
    outcome = run_process("exec", coded, "--", "printf", "%s\n", "{}", "--model={}", "{1}:{2}{x}", cwd=temporary.parent)
    assert outcome.code == 0
    first, second, third = outcome.text.splitlines()
    assert os.path.basename(first) == "m.gguf"
    assert os.path.dirname(os.path.dirname(first)) == str(temporary)
    assert second == f"--model={first}"
    assert third == f"{first}:{{2}}{{x}}"


def test_several_files(coded, model, tmp_path, temporary):
    other = tmp_path / "other"
    other.mkdir()
    same_name = other / coded.name
    same_name.write_bytes(coded.read_bytes())
    outcome = run_process("exec", coded, model, same_name, "--", "printf", "%s\n", "{2}", "{3}", "{1}")
    assert outcome.code == 0
    plain, third, first = outcome.text.splitlines()
    assert plain == str(model)
    assert (os.path.basename(first), os.path.basename(third)) == ("m.gguf", "m-3.gguf")


def test_gguf_is_used_as_it_is(lw, model):
    outcome = lw("exec", model, "--", "printf", "%s", "{}")
    assert (outcome.code, outcome.text) == (0, str(model))


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 7", 7), ("exit 0", 0), ("kill -TERM $$", 143), ("kill -KILL $$", 137)],
)
def test_exit_code_is_the_programs(coded, temporary, program, code):
    outcome = run_process("exec", coded, "--", "sh", "-c", program, "{}")
    assert (outcome.code, outcome.stderr) == (code, "")


def test_program_that_cannot_be_run(lw, coded, temporary, tmp_path):
    outcome = lw("exec", coded, "--", tmp_path / "none", "{}")
    assert outcome.code == 127
    assert "none: No such file" in outcome.stderr
    text = tmp_path / "text"
    text.write_text("hello")
    outcome = lw("exec", coded, "--", text, "{}")
    assert outcome.code == 126
    assert "text: Permission denied" in outcome.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("m.lw",), "the program is missing"),
        (("m.lw", "--"), "the program is missing"),
        (("m.lw", "--", "ls"), "no argument of the program has {}"),
        (("m.lw", "--", "ls", "{2}"), "no argument of the program has {}"),
        (("m.lw", "n.lw", "--", "ls", "{}"), "write {1} to {2} instead of {}"),
        (("--", "ls", "{}"), "FILE"),
    ],
)
def test_usage_errors(lw, argv, said):
    outcome = lw("exec", *argv)
    assert outcome.code == 2
    assert said in outcome.stderr


def test_damaged_file_runs_nothing(coded, temporary, tmp_path):
    data = bytearray(coded.read_bytes())
    data[-3000] ^= 1
    damaged = tmp_path / "damaged.lw"
    damaged.write_bytes(data)
    for path in (damaged, tmp_path / "none.lw"):
        outcome = run_process("exec", path, "--", "echo", "{}")
        assert outcome.code == 1
        assert outcome.stdout == b""
        assert f"ERROR {path}: " in outcome.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_program(coded, temporary, number):
    with start("exec", coded, "--", sys.executable, "-c", WAIT, "{}", start_new_session=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.endswith(b" b'GGUF'\n")
        assert len(os.listdir(temporary)) == 1
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert out == f"got {int(number)}\n".encode()
    assert (process.returncode, err) == (5, b"")


def test_terminal_interrupts_the_program_once(coded, temporary):
    """Ctrl-C goes to all processes in the foreground: passing it on would be once too often."""
    ours, theirs = os.openpty()
    argv = ("exec", "-q", coded, "--", sys.executable, "-c", COUNT, "{}")
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    seen = b""
    with start(*argv, driver=ON_TERMINAL, start_new_session=True, **streams) as process:
        os.close(theirs)
        while b"ready" not in seen:
            seen += os.read(ours, 100)
        os.write(ours, b"\x03")
        while b"got" not in seen or not seen.endswith(b"\n"):
            seen += os.read(ours, 100)
    os.close(ours)
    assert process.returncode == 0
    assert seen.endswith(b"got 1\r\n")


def test_standard_streams_are_the_programs(coded, temporary):
    outcome = run_process("exec", coded, "--", "sh", "-c", "cat; echo no >&2; test -e $0", "{}", data=b"in")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, b"in", "no\n")


def test_no_file_is_written(temporary, tmp_path, lw):
    source = tmp_path / "large.gguf"
    source.write_bytes(model_bytes(n_tensors=40))
    assert lw("encode", "-q", source).code == 0
    outcome = run_process("exec", f"{source}.lw", "--", "find", temporary, "-type", "f", "-o", "-samefile", "{}")
    links = outcome.text.split()
    assert [os.path.basename(link) for link in links] == ["large.gguf"]


def test_help_shows_the_form():
    done = subprocess.run(
        [sys.executable, "-m", "lazyweights", "exec", "--help"], capture_output=True, text=True, check=True
    )
    assert "FILE [FILE ...] -- PROGRAM" in done.stdout
