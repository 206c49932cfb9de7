"""Counts the damaged and hostile files that the tests of this room try, and prints the sums at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_CASES: dict[str, int] = {}


@pytest.fixture
def count_cases() -> Callable[[str, int], None]:
    """Add cases of one kind to the summary."""

    def add(kind: str, n: int) -> None:
        _CASES[kind] = _CASES.get(kind, 0) + n

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _CASES:
        terminalreporter.section("damaged and hostile coded files")
        for kind, n in _CASES.items():
            terminalreporter.line(f"{n:7d}  {kind}")
        terminalreporter.line(f"{sum(_CASES.values()):7d}  cases in all, each a typed error or the right bytes")
