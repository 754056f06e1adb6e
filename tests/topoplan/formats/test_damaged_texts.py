"""Damaged texts in every reader: taken, or refused with one of topoplan's errors, and never a traceback.

`tests.bench.mutations` does the same with thousands of each; what a mutation found is mended and its kind tested where
the reader's tests are.
"""

from __future__ import annotations

import pytest

from tests.bench.mutations import outcome
from tests.support.text_readers import Reader, readers


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
@pytest.mark.parametrize("number", [5, pytest.param(200, marks=pytest.mark.thorough)])
def test_damaged_texts_leave_no_traceback(reader: Reader, number: int) -> None:
    """The same texts in every run; whole ones are taken, so that a mutation damages something."""
    for text in reader.texts:
        reader.read(text)
    assert outcome(reader, range(number)).tracebacks == {}
