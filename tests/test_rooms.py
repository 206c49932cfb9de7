"""Who may import whom: the room table of the architecture, read off the source text.

A room imports only what the table lists, `errors` is open to all, and `import lazyweights` stays cheap.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "lazyweights"

# Room -> the rooms it may import, besides itself and `errors`. A new room goes in here first.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "codecs": set(),
    "blocks": set(),
    "container": {"codecs", "blocks"},
    "hardware": {"codecs"},
    "gpu_decode": {"codecs", "blocks", "container"},
    "llama": {"container"},
    "quant": {"blocks", "codecs", "container", "llama"},
    "spax": {"codecs", "container", "llama", "gpu_decode"},
}
ROOMS["reports"] = {*ROOMS, "lazyweights"}  # the package: its version, which reports name
ROOMS["cli"] = {*ROOMS, "reports", "lazyweights"}

TOP = {"__init__", "__main__"}  # of the package itself: any room, but only inside functions
OPTIONAL = {"cupy", "llama_cpp", "matplotlib", "jinja2", "markupsafe", "gguf"}


@dataclass(frozen=True)
class Import:
    """One imported module: its dotted name, its line, whether it runs when the importing module loads."""

    name: str
    line: int
    at_load: bool


def find_imports(source: str, package: str) -> list[Import]:
    """Find every import of a module; `package` is what its relative imports start from.

    ``from a import b`` counts as ``a.b``: b may be a module.
    """
    return list(_walk(ast.parse(source), package, at_load=True))


def _walk(node: ast.AST, package: str, *, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, at_load)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - child.level + 1], *filter(None, [base])])
            for alias in child.names:
                yield Import(f"{base}.{alias.name}", child.lineno, at_load)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for branch, runs in ((child.body, False), (child.orelse, at_load)):
                for statement in branch:
                    yield from _walk(ast.Module([statement], []), package, at_load=runs)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, package, at_load=False)
        else:
            yield from _walk(child, package, at_load=at_load)


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module, from its dotted name below the package; ``lazyweights`` for the package itself."""
    return parts[0] if parts and parts[0] in ROOMS else "lazyweights"


def violations(source: str, module: tuple[str, ...], *, is_package: bool) -> list[str]:
    """Say which imports of a module break the rules; `module` is its name below the package."""
    package = ".".join(["lazyweights", *(module if is_package else module[:-1])])
    room = room_of(module)
    found = []
    for imported in find_imports(source, package):
        top, *below = imported.name.split(".")
        where = f"{'.'.join(module)}:{imported.line}: {imported.name}"
        if top == "lazyweights":
            target = room_of(tuple(below))
            if room == "lazyweights":
                if imported.at_load and module != ("__main__",):
                    found.append(f"{where}: the package itself imports inside functions only")
            elif target not in {room, "errors", *ROOMS[room]}:
                found.append(f"{where}: {room} may not import {target}")
            elif room == "cli" and imported.at_load and target not in {"cli", "errors", "lazyweights"}:
                found.append(f"{where}: cli imports other rooms inside functions only")
        elif top in OPTIONAL and imported.at_load:
            found.append(f"{where}: {top} is optional: import it inside a function")
        elif room in {"cli", "lazyweights"} and imported.at_load and top not in sys.stdlib_module_names:
            found.append(f"{where}: {room} imports {top} inside functions only")
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_room_table(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = parts[:-1] if is_package else parts
    assert parts[0] in ROOMS or parts[0] in TOP, f"{parts[0]} is not in the room table"
    assert violations(path.read_text(encoding="utf-8"), name, is_package=is_package) == []


def test_table_points_down_only():
    levels = dict(errors=0, codecs=1, blocks=1, container=2, hardware=2, gpu_decode=3, llama=3, quant=4, spax=4)
    levels.update(reports=5, cli=6, lazyweights=6)
    for room, targets in ROOMS.items():
        for target in targets - {"lazyweights"}:
            assert levels[target] < levels[room], (room, target)


@pytest.mark.parametrize(
    ("source", "module", "is_package", "said"),
    [
        ("import lazyweights.container.encoder", "codecs.x", False, "codecs may not import container"),
        ("from lazyweights import container", "codecs.x", False, "codecs may not import container"),
        ("from ..container import encoder", "codecs.x", False, "codecs may not import container"),
        ("from .. import container", "codecs", True, "codecs may not import container"),
        ("from . import container", "codecs", True, None),
        ("from .container import encoder", "", True, "inside functions only"),
        ("from . import lanes", "codecs.x", False, None),
        ("from lazyweights.codecs import lanes", "blocks.x", False, "blocks may not import codecs"),
        ("def f():\n    from lazyweights.cli import main", "quant.x", False, "quant may not import cli"),
        ("from lazyweights.errors import CodecError", "codecs.x", False, None),
        ("import lazyweights", "container.x", False, "container may not import lazyweights"),
        ("import lazyweights", "cli.x", False, None),
        ("import numpy as np", "container.x", False, None),
        ("import numpy as np", "cli.x", False, "cli imports numpy inside functions only"),
        ("def f():\n    import numpy", "cli.x", False, None),
        ("class A:\n    import numpy", "cli.x", False, "inside functions only"),
        ("try:\n    import rich\nexcept ImportError:\n    pass", "cli.x", False, "inside functions only"),
        ("from lazyweights.container import encoder", "cli.x", False, "cli imports other rooms inside functions"),
        ("if TYPE_CHECKING:\n    from lazyweights.container import encoder", "cli.x", False, None),
        ("if TYPE_CHECKING:\n    from lazyweights.quant import gptq", "container.x", False, "may not import quant"),
        ("import gguf.quants", "quant.x", False, "gguf is optional"),
        ("from cupy import cuda", "gpu_decode.x", False, "cupy is optional"),
        ("def f():\n    import cupy", "gpu_decode.x", False, None),
        ("import argparse, os.path", "cli.x", False, None),
    ],
)
def test_checker_sees_what_it_should(source, module, is_package, said):
    found = violations(source, tuple(filter(None, module.split("."))), is_package=is_package)
    assert len(found) == (said is not None), found
    assert said is None or said in found[0]


def test_import_loads_nothing_heavy():
    code = (
        "import sys, threading\n"
        "before = set(sys.modules)\n"
        "import lazyweights\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(threading.active_count(), *sorted(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    n_threads, *loaded = done.stdout.split()
    assert n_threads == "1"
    assert "lazyweights" in loaded
    assert not {"numba", "rich", "zstandard", "xxhash", *OPTIONAL} & set(loaded)


def test_help_runs():
    done = subprocess.run(
        [sys.executable, "-m", "lazyweights", "--help"], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == b""
