"""What the tests share: markers, and the count of training cases that is printed at the end."""

from __future__ import annotations

from collections import Counter

import pytest


class CountedCases:
    """Training cases that passed, by each of their properties."""

    def __init__(self) -> None:
        self.total = 0
        self.by: dict[str, Counter] = {}

    def add(self, **properties: object) -> None:
        self.total += 1
        for name, value in properties.items():
            self.by.setdefault(name, Counter())[str(value)] += 1


_counted = CountedCases()


@pytest.fixture
def counted_cases() -> CountedCases:
    return _counted


def pytest_terminal_summary(terminalreporter) -> None:
    if not _counted.total:
        return
    terminalreporter.section("training cases equal to DDP")
    terminalreporter.line(f"{_counted.total} cases")
    for name, counts in _counted.by.items():
        terminalreporter.line(f"  by {name}: " + ", ".join(f"{value} {count}" for value, count in counts.items()))
