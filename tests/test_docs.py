"""The documents stay true: examples run, commands parse, options are complete, links and names lead somewhere.

Usage: python -m tests.test_docs

As a program it writes the outputs of the console examples in README.md anew (on the real model that they name).
"""

from __future__ import annotations

import argparse
import doctest
import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazyweights import errors
from lazyweights.cli.main import build_parser
from tests.make_gguf import Tensor, build_gguf
from tests.make_goldens import made_up_tensor

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "lazyweights"
MODELS = REPOSITORY / ".cache" / "models"
README = REPOSITORY / "README.md"
DOCUMENTS = (README, REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md")))

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def fenced(text: str, *languages: str) -> list[str]:
    """Return the contents of the fenced blocks of some languages."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for language, body in blocks if language in languages]


def prose(text: str) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# Examples in Python.


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small model of the examples, ``model.gguf`` in the current directory."""
    tensors: list[Tensor] = [
        made_up_tensor("token_embd.weight", "Q8_0", (64, 100)),
        made_up_tensor("blk.0.attn_q.weight", "Q4_K", (256, 192)),
        made_up_tensor("blk.0.ffn_down_exps.weight", "Q4_0", (64, 96, 4)),
        made_up_tensor("blk.0.attn_norm.weight", "F32", (256,)),
        made_up_tensor("output_norm.weight", "F32", (256,)),
    ]
    path = tmp_path / "model.gguf"
    path.write_bytes(build_gguf(tensors, {"general.architecture": "llama", "general.name": "Example"}))
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.usefixtures("model")
def test_examples_of_the_interface() -> None:
    text = read("docs/api.md")
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, "api.md", "docs/api.md", 0)
    assert len(test.examples) > 30
    output: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=output.append)
    assert not failed, "".join(output)


@pytest.mark.usefixtures("model")
def test_example_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = fenced(README.read_text(encoding="utf-8"), "python")
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "llama"
    assert len(printed) == 6


def test_errors_are_listed() -> None:
    text = read("docs/api.md").split("## Errors")[1].split("\n## ")[0]
    classes = dict(inspect.getmembers(errors, inspect.isclass))
    known = {name for name, value in classes.items() if issubclass(value, errors.LazyWeightsError)}
    named = set(re.findall(r"`(\w+Error)`", text))
    assert named - {"KeyError", "IndexError"} == known


# The command line.


def verbs() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb."""
    actions = build_parser()._actions
    (found,) = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


@pytest.mark.parametrize(
    "verb",
    [
        "encode", "decode", "verify", "inspect", "perplexity", "run", "exec", "capture", "stock-quantize", "import-gptq",
        "quantize", "report", "simulate",
    ],
)  # fmt: skip
def test_options_are_listed(verb: str) -> None:
    section = read("docs/cli.md").split(f"\n## {verb}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`-.+?) \| ", section, re.MULTILINE)
    listed = set(re.findall(r"`(-[\w-]+)", " ".join(rows)))
    parser = verbs()[verb]
    options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
    assert listed == options


def test_verbs_are_listed() -> None:
    assert set(re.findall(r"^\| \[([\w-]+)\]", read("docs/cli.md"), re.MULTILINE)) == set(verbs())


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``lazyweights`` command in the shell blocks and the inline code of a document."""
    lines = [line.removeprefix("$ ") for block in fenced(text, "sh", "console") for line in block.splitlines()]
    lines += [code for code in re.findall(r"`([^`\n]+)`", prose(text)) if re.match(r"(\S+ .*\| )?lazyweights ", code)]
    for line in lines:
        for command in re.split(r"\s(?:\||&&)\s", line):
            words = shlex.split(command, comments=True)
            if words[:1] == ["lazyweights"]:
                yield words[1:]


@documents
def test_commands_parse(path: Path) -> None:
    for arguments in commands(path.read_text(encoding="utf-8")):
        if arguments[0] in verbs() and len(arguments) > 1:
            build_parser().parse_args(arguments)


def test_commands_are_found() -> None:
    assert len(list(commands(read("docs/cli.md")))) > 15
    assert ["inspect", "--estimate", "model.gguf"] in list(commands(README.read_text(encoding="utf-8")))


@documents
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`make (\w+)`", text)) | set(re.findall(r"^make (\w+)", text, re.MULTILINE))
    assert named <= targets


SECONDS = re.compile(r"\b\d+(?:\.\d+)? s\b")


def with_outputs(text: str, folder: Path) -> str:
    """Return a document whose console blocks show what their commands print in `folder`."""

    def run(block: re.Match[str]) -> str:
        lines = []
        for line in block.group(1).splitlines():
            if line.startswith("$ "):
                lines += [line, *output_of(shlex.split(line[2:]), folder)]
        return "```console\n" + "\n".join(lines) + "\n```"

    return re.sub(r"^```console\n(.*?)\n```$", run, text, flags=re.DOTALL | re.MULTILINE)


def output_of(command: list[str], folder: Path) -> list[str]:
    """Run a command; return the lines of both its outputs without space at their ends."""
    assert command[0] == "lazyweights"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=True,
    )  # fmt: skip
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return [line for line in lines if line]


def link_models(text: str, folder: Path) -> str | None:
    """Put the real models that a document names into `folder`; return the name of one that is missing."""
    for name in set(re.findall(r"[\w.-]+\.gguf\b(?!\.)", "\n".join(fenced(text, "console")))):
        if (MODELS / name).is_file():
            (folder / name).symlink_to((MODELS / name).resolve())
        elif f" -o {name}" not in text:
            return name
    return None


@pytest.mark.real
def test_console_examples_print_what_is_shown(tmp_path: Path) -> None:
    """Else: python -m tests.test_docs."""
    text = README.read_text(encoding="utf-8")
    missing = link_models(text, tmp_path)
    if missing:
        pytest.skip(f"{missing} is not in .cache/models; `make test` fetches it")
    shown, now = fenced(text, "console"), fenced(with_outputs(text, tmp_path), "console")
    assert [SECONDS.sub("N s", block) for block in shown] == [SECONDS.sub("N s", block) for block in now]


# Links and names.


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a document."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE):
        plain = re.sub(r"[`*\[\]()]", "", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


@documents
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        assert REPOSITORY in linked.parents, target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


@documents
def test_named_files_and_functions_exist(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    folders = (REPOSITORY, PACKAGE, REPOSITORY / "tests" / "container", REPOSITORY / "tests")
    for name in set(re.findall(r"`([\w./]+\.(?:py|lw|json))`", text)):
        if ("/" in name and not name.startswith(".")) or name.endswith(".py"):
            assert any((folder / name).is_file() for folder in folders), name
    for file, names in re.findall(r"\[`([\w/]+\.py)`((?:, `\w+`)+)\]", text):
        source = (PACKAGE / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in source, (file, name)


def test_documents_that_the_package_names_exist() -> None:
    found = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for document, section in re.findall(r"`(docs/[\w/]+\.md)`(?:, \"([^\"]+)\")?", path.read_text(encoding="utf-8")):
            text = read(document)
            assert not section or f"# {section}\n" in text, (path.name, document, section)
            found += 1
    assert found


@documents
def test_nothing_of_this_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.])/(?:work|home|root|tmp|mnt)/", text)
    written = re.sub(r"<!-- table: .*?<!-- /table -->", "", prose(text), flags=re.DOTALL)  # tables are generated
    assert max(len(line) for line in written.splitlines() if "|" not in line and "](" not in line) <= 130


def main() -> None:
    """Write the console examples of README.md anew."""
    text = README.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        missing = link_models(text, Path(folder))
        if missing:
            sys.exit(f"{missing} is not in {MODELS.relative_to(REPOSITORY)}")
        README.write_text(with_outputs(text, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
