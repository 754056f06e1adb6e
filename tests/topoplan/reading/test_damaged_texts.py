"""Damaged texts in every reader: taken, or refused with one of topoplan's errors, and never a traceback.

`tests.bench.mutations` does the same with thousands of each; what a mutation found is mended and its kind tested where
the reader's tests are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.bench.mutations import outcome
from tests.support.text_readers import Reader, readers
from topoplan.errors import TopoplanError
from topoplan.reading.load import load_text
from topoplan.units import parse_size


@pytest.mark.parametrize("reader", readers(), ids=lambda reader: reader.name)
@pytest.mark.parametrize("number", [5, pytest.param(200, marks=pytest.mark.thorough)])
def test_damaged_texts_leave_no_traceback(reader: Reader, number: int) -> None:
    """The same texts in every run; whole ones are taken, so that a mutation damages something."""
    for text in reader.texts:
        reader.read(text)
    assert outcome(reader, range(number)).tracebacks == {}


@pytest.mark.parametrize(
    ("read", "start", "repeated", "end"),
    [
        (parse_size, "0", " ", "x"),
        (parse_size, "1", "0", "x"),
        (load_text, "GPU 0: V100\nLink 0: 25", " ", "x GB/s"),
        (load_text, "GPU 0: V100\nLink 0: Remote Device 25", ":", ""),
        (load_text, "GPU 0: V100\nLink 0: a", ".a:", ""),
        (load_text, "GPU 0: V100", "(UUID:", "\nLink 0: 25 GB/s"),
        (load_text, "GPU type: H100", " ", "x\n\tGPU0\tGPU1\nGPU0\t X \tNV1\nGPU1\tNV1\t X \n"),
    ],
)
def test_a_long_run_of_one_sign_is_read_in_one_pass(
    read: Callable[[str], object], start: str, repeated: str, end: str
) -> None:
    """A pattern that tries again at each sign of a run would take minutes here."""
    with suppress(TopoplanError):
        read(start + repeated * 1_000_000 + end)
