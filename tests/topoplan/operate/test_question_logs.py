"""The logs of docs/questions are what their writers write, and what the pages say of them holds."""

from __future__ import annotations

import pytest

from tests.support.question_logs import FOLDER, INVENTED, LOGS


@pytest.mark.parametrize("name", LOGS)
def test_the_logs_of_the_pages_are_their_writers_own(name: str) -> None:
    """After a change: ``python -m tests.support.question_logs``."""
    assert (FOLDER / name).read_text(encoding="utf-8") == INVENTED + LOGS[name]


def test_the_folder_holds_no_other_log() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(LOGS)
