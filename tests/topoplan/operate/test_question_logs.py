"""The logs of docs/questions are what their writers write, and what the pages say of them holds."""

from __future__ import annotations

from tests.support.question_logs import FOLDER, INVENTED, LOGS


def test_the_logs_of_the_pages_are_those_of_their_writers() -> None:
    """After a change: ``python -m tests.support.question_logs``."""
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found == {name: INVENTED + text for name, text in LOGS.items()}
