"""Samples for the tests of damaged and hostile files, and the number of such files that they tried, told at the end."""

from __future__ import annotations

import pytest

from tests.container.damage import CountCases, Sample, make_sample

_CASES: dict[str, int] = {}


@pytest.fixture
def count_cases() -> CountCases:
    """Add cases of one kind to the summary."""

    def add(kind: str, n: int) -> None:
        _CASES[kind] = _CASES.get(kind, 0) + n

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _CASES:
        terminalreporter.section("damaged and hostile coded files")
        for kind, n in _CASES.items():
            terminalreporter.line(f"{n:7d}  {kind}")
        terminalreporter.line(f"{sum(_CASES.values()):7d}  cases in all; each ends in a typed error or the right bytes")


@pytest.fixture(scope="session", params=["dense", "unit"])
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """A small coded file with every kind of unit, of each preset."""
    return make_sample(tmp_path_factory.mktemp("sample"), request.param)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """The same, preset `dense` only."""
    return make_sample(tmp_path_factory.mktemp("dense"), "dense")
