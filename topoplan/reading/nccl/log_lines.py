"""Strip from the lines of a log the additions of terminals, web pages and launchers.

A launcher puts a label before every line, often a time stamp too, and several may follow one another:

    [1,0]<stdout>: …            mpirun --tag-output; prterun and SageMaker write more between the brackets
    [default0]:…  [rank0]: …    torchrun
    [0] …  0: …                 mpiexec -l, srun -l
    n1: …  nccl-1  | …          pdsh and clush, docker compose
    Nov  2 10:00:00 n1 nccl[7]: syslog
    [pod/name/container] …      kubectl logs --prefix; stern writes both names and blanks
    > …                         a quotation

A label is removed only if it is the whole beginning of a line, so that no word of the log itself is lost. Every
pattern matches a bounded number of characters, so that a long line costs no more than its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[()][0-9A-Za-z])"
)
_TIME = re.compile(
    r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d|\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    r"(?: [\w.-]{1,100}(?= [\w./@-]{1,100}(?:\[\d{1,10}\])?:))?)"
    r"(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?[ \t]{1,8}"
)
_EPOCH = re.compile(r"\[? {0,8}\d{1,10}\.\d{3,9}\]?[ \t]{1,8}(?=#|\[|\S{1,200}[:|])")
_LABEL = re.compile(
    r"[ \t]{0,40}(?:"
    r">[ \t]?"
    r"|\[[^][<>\s]{1,200}(?: [^][<>\s]{1,100})?\]<std(?:out|err|diag)>:?[ \t]?"
    r"|\[(?:default|rank|worker|local_rank)[ _]?\d{1,6}\]:?[ \t]?"
    r"|\[pod/[^][\s]{1,300}\][ \t]?"
    r"|\[\d{1,6}\]:?[ \t]"
    r"|[\w./@-]{1,200}[ \t]{0,40}\|[ \t]?"
    r"|[\w./@-]{1,200}(?:\[\d{1,10}\])?:(?:[ \t]{1,8}|(?=#))"
    r")"
)
_WORDS = re.compile(
    r"(?=[A-Za-z])(?:[\w./@-]{1,200}[ \t]{1,8}){1,3}"
    r"(?=#(?:[ \t]|$)|\{\"|[ \t]{0,40}\d{1,20} {1,20}\d{1,20} {1,20}[a-z])"
)
"""Names before a comment or a row of a test, as stern and ``kubectl logs`` over several pods write them."""

ENDLESS = re.compile(r"[0-9]{25}")
"""More digits than any number of a log has."""

_ENTITIES = (("&gt;", ">"), ("&lt;", "<"), ("&quot;", '"'), ("&nbsp;", " "), ("&amp;", "&"))
_MOST = 6
"""Largest number of labels before a line."""


def log_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield every line with its number from 1, without colours, hard blanks and HTML's entities, with its labels.

    A progress bar that returns to the beginning of its line makes several lines of one number.

    >>> list(log_lines("\\ufeffone\\r\\n\\x1b[32mtwo\\x1b[0m 0 -&gt; 1"))
    [(1, 'one'), (2, 'two 0 -> 1')]
    """
    for number, whole in enumerate(text.split("\n"), 1):
        for line in whole.split("\r"):
            if "\x1b" in line:
                line = _ESCAPE.sub("", line)
            if "&" in line:
                for entity, character in _ENTITIES:
                    line = line.replace(entity, character)
            line = line.replace("\xa0", " ").replace("\ufeff", "").replace("\u200b", "")
            if line or line is whole:
                yield number, line


def split_label(line: str) -> tuple[str, str]:
    """Return the labels before a line, without blanks and time stamps, and the rest of the line.

    >>> split_label("2026-11-02T10:00:00.5Z [1,0]<stdout>:#  Rank  0")
    ('[1,0]<stdout>:', '#  Rank  0')
    >>> split_label("n1 | 0: nccl-tests: done"), split_label("# nThread 1: no label")
    (('n1 |0:nccl-tests:', 'done'), ('', '# nThread 1: no label'))
    """
    labels, start = "", 0
    for _ in range(_MOST):
        found = _TIME.match(line, start) or _EPOCH.match(line, start)
        if found is None:
            found = _LABEL.match(line, start) or _WORDS.match(line, start)
            if found is None:
                break
            labels += found[0].strip()
        start = found.end()
    return labels, line[start:]
