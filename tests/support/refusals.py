"""What a wrong request gets: an error of one line that says what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(
    error: type[Exception] | tuple[type[Exception], ...], *says: str, begins: str = ""
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of one line with all of these parts."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert message.startswith(begins), message
    assert all(part in message for part in says), message
    assert "\n" not in message
