"""Texts that were damaged on their way, for readers that must take or refuse them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st


def mutated(text: str, data: st.DataObject, *, words: Sequence[str]) -> str:
    """A text with characters, words and lines removed, repeated, swapped, replaced by some ``words``, or cut off."""
    for _ in range(data.draw(st.integers(1, 4))):
        unit = data.draw(st.sampled_from(["", " ", "\t", "\n"]))
        parts = text.split(unit) if unit else list(text)
        if not parts:
            return text
        i, j = (data.draw(st.integers(0, len(parts) - 1)) for _ in range(2))
        action = data.draw(st.sampled_from(["remove", "repeat", "swap", "replace", "cut"]))
        if action == "remove":
            del parts[i]
        elif action == "repeat":
            parts.insert(i, parts[j])
        elif action == "swap":
            parts[i], parts[j] = parts[j], parts[i]
        elif action == "cut":
            parts = parts[: i + 1]
        else:
            parts[i] = data.draw(st.sampled_from(words))
        text = unit.join(parts)
    return text
