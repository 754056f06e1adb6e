"""A fake CuPy whose kernels run on this processor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fake_streams import Machine
from tests.support.selection_on_cpu import Launches, install_selection
from tests.support.sparse_steps import TWO_SERVERS


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Launches]:
    """CuPy on one GPU for each rank of two servers, and the names of its launches."""
    return install_selection(monkeypatch, Machine(gpus=len(TWO_SERVERS.ranks)))
