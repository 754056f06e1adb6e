"""Damaged texts, which readers must take or refuse: drawn by hypothesis, or by a seeded generator (`mutation`)."""

from __future__ import annotations

import random
import re
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


HUGE = (
    *("9" * 5000, "1" * 25, str(2**63), str(2**31), "99999999", "1e999", "-1", "0", "0.0", "-0.5"),
    *("nan", "inf", "0x10", "1/0", "007", "1_000", "1e-400", "1e9"),
)
"""Numbers and what looks like one, in place of those of a text."""

ODD = (
    *("\x00", "\ufeff", "\xa0", "\u200b", "\u2028", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\r\n", "\x1b[31m"),
    *("²", "٣", "８", "½", "Ⅷ", "é", "ı", "\U0001f600", "\udc80", "\ud83d", "\u202e", "＃", "－"),
)
"""Characters that split lines, count as digits or letters, or cannot be encoded."""

LONG = (
    *(
        " ",
        "\t",
        "a",
        "1",
        "-1 ",
        "0 1 ",
        "a ",
        ":",
        "/",
        "[",
        "{",
        "(",
        '"',
        "\\",
        "-",
        ",",
        "=",
        "a:1:",
        "[1,0] ",
    ),
    *("NCCL ", "0x", "1.", ".0", "# ", "<", "{}", "1->"),
)
"""What a text repeats until a line is long."""

LENGTH = 60_000  # characters of a long line


def mutation(text: str, rng: random.Random) -> str:
    """Return a text after one to three random damages, of characters, lines, blanks, numbers, lengths and encodings."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice(_DAMAGES)(text, rng)
        if not text:
            break
    return text[: 4 * LENGTH]


def _spot(text: str, rng: random.Random) -> int:
    return rng.randint(0, len(text))


def _flip(text: str, rng: random.Random) -> str:
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(rng.randint(1, 3)):
        content[rng.randrange(len(content))] ^= 1 << rng.randint(0, 7)
    return content.decode("utf-8", "replace")


def _lines(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
    action = rng.randrange(5)
    if action == 0:
        del lines[i : i + rng.randint(1, 3)]
    elif action == 1:
        lines.insert(i, lines[j])
    elif action == 2:
        lines[i], lines[j] = lines[j], lines[i]
    elif action == 3:
        lines[i : i + 2] = ["".join(lines[i : i + 2])]
    else:
        lines[i:i] = lines[j : j + 1] * rng.randint(2, 300)
    return "\n".join(lines)


def _words(text: str, rng: random.Random) -> str:
    words = list(re.finditer(r"[^\s\"<>=,:{}\[\]]+", text))
    if not words:
        return text
    one, other = rng.choice(words), rng.choice(words)
    new = rng.choice(("", one[0] * 2, other[0], other[0], one[0].upper(), one[0][: len(one[0]) // 2]))
    return text[: one.start()] + new + text[one.end() :]


def _blanks(text: str, rng: random.Random) -> str:
    runs = list(re.finditer(r"[ \t]+", text))
    if not runs:
        return text
    one = rng.choice(runs)
    return text[: one.start()] + rng.choice(("", "", "  ", "\t", " " * 30, "\n")) + text[one.end() :]


def _number(text: str, rng: random.Random) -> str:
    numbers = list(re.finditer(r"[0-9]+(?:\.[0-9]+)?", text))
    if not numbers:
        return text
    one = rng.choice(numbers)
    return text[: one.start()] + rng.choice((*HUGE, str(rng.randint(0, 40)))) + text[one.end() :]


def _long(text: str, rng: random.Random) -> str:
    """Make a line long, by one of `LONG` or by a piece of the text."""
    spot = _spot(text, rng)
    piece = rng.choice((*LONG, *LONG, text[spot : spot + rng.randint(1, 30)])) or "a"
    return text[:spot] + piece * (LENGTH // len(piece)) + text[spot:]


def _cut(text: str, rng: random.Random) -> str:
    first, last = sorted((_spot(text, rng), _spot(text, rng)))
    return rng.choice((text[:first], text[:last], text[first:], text[:first] + text[last:]))


def _odd(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 3)):
        spot = _spot(text, rng)
        text = text[:spot] + rng.choice(ODD) + text[spot + rng.randint(0, 1) :]
    return text


def _whole(text: str, rng: random.Random) -> str:
    """Change every line: its end, its beginning, or how the text is encoded."""
    label = rng.choice(("> ", "0: ", "[1,0]<stdout>:", "n1 | ", "# ", "\x1b[0m"))
    return rng.choice(
        (
            lambda: text.replace("\n", "\r\n"),
            lambda: text.replace("\n", "\r"),
            lambda: text.replace("\n", " "),
            lambda: "\n".join(label + line for line in text.split("\n")),
            lambda: "\n".join(line.strip() for line in text.split("\n")),
            lambda: text.replace(" ", ""),
            lambda: text.encode("utf-8", "replace").decode("latin-1"),
            lambda: "\ufeff" + text,
            lambda: text + text,
        )
    )()


_DAMAGES = (_flip, _lines, _words, _words, _blanks, _number, _number, _long, _cut, _odd, _whole)
