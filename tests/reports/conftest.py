"""A whole report on the tiny model, with a made-up tuned quantizer."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FORMATS = ("Q8_0", "Q4_0")
BUDGETS = (2.0, 50.0)


@dataclass(frozen=True)
class FakeResult:
    """What the tuned quantizer returns."""

    settings: dict[str, Any]
    seconds: float = 0.1
    tensors: list[dict[str, Any]] = field(default_factory=list)


class FakeQuantizer:
    """Takes stock formats for steps: the larger the step, the fewer bits."""

    quantized: list[float] = []  # noqa: RUF012 - shared on purpose
    open = 0

    def __init__(self, source: object, hessians: object, *, threads: int = 0, **settings: Any) -> None:
        assert Path(str(hessians)).is_file()
        self.source, self.hessians, self.settings = source, hessians, settings
        FakeQuantizer.open += 1

    def __enter__(self) -> FakeQuantizer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        FakeQuantizer.open -= 1

    def quantize(self, output: object, step: float, *, progress: Any = None) -> FakeResult:
        from lazyweights.llama.stock import stock_quantize

        name = "Q8_0" if step < 0.5 else "Q5_1" if step < 4 else "Q4_1"
        stock_quantize(self.source, output, name)  # type: ignore[arg-type]
        progress(1, 1, "all of it")
        FakeQuantizer.quantized.append(step)
        return FakeResult({"stands_for": name, **self.settings})


@contextmanager
def fake_quantizer() -> Iterator[None]:
    """Put the made-up quantizer where the real one belongs."""
    module = types.ModuleType("lazyweights.quant.tuned")
    module.TunedQuantizer = FakeQuantizer  # type: ignore[attr-defined]
    module.METHOD_VERSION = 0  # type: ignore[attr-defined]
    name = "lazyweights.quant.tuned"
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@dataclass(frozen=True)
class Made:
    """A report that was made, and how to make it again."""

    folder: Path
    model: Path
    text: Path
    calibration: Path
    document: dict[str, Any]
    again: Callable[..., Any]


@pytest.fixture(scope="session")
def tiny_report(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A report on the tiny model: source, two stock formats, tuned points for two budgets."""
    for name in ("llama_cpp", "matplotlib", "jinja2"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    from lazyweights.reports.model_report import ReportOptions, measure_model
    from lazyweights.reports.report_data import build_document
    from lazyweights.reports.report_files import Report, make_report
    from tests.llama.texts import english
    from tests.llama.tiny_model import write_tiny_model

    inputs = tmp_path_factory.mktemp("inputs")
    model = write_tiny_model(inputs / "tiny.gguf")
    text, calibration = inputs / "text.txt", inputs / "calibration.txt"
    text.write_bytes(english(400))
    calibration.write_bytes(english(300, seed=1))

    def make(folder: Path, *, page: bool = False, **changes: Any) -> Report:
        options = {"n_ctx": 64, "n_chunks": 4, "formats": FORMATS, "budgets": BUDGETS, "calibration_chunks": 2,
                   **changes.pop("options", {})}  # fmt: skip
        with fake_quantizer():
            arguments = {"calibration": calibration, "options": ReportOptions(**options), **changes}
            if page:
                return make_report(model, text, folder, **arguments)
            found = measure_model(model, text, folder, **arguments)  # plots take longer than all of this
            return Report(build_document(found, model, text, ReportOptions(**options)), found, ("", "", ""))

    folder = tmp_path_factory.mktemp("report")
    report = make(folder, page=True)
    return Made(folder, model, text, calibration, report.document, make)
