"""README and docs do what they say: every command runs, and prints what stands below it.

A block that cannot run here has a comment above it that says why: ``<!-- not run: needs a GPU -->``. In what is printed
a line of ``…`` stands for any lines, ``…`` at the end of a line for its rest; times and rates that were measured may
differ.

A block of Python below ``<!-- ranks: 2 -->`` is a file that torchrun starts as so many processes; the block behind it
is what they print, in any order.

Sentences are short: ``python -m tests.test_docs [PAGE ...]`` prints the median and the longest of each page, and what
the test of prose would refuse.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import topoplan
from tests.conftest import Run
from tests.support.checkout import ROOT
from tests.support.question_logs import FOLDER, INVENTED, LOGS
from tests.support.torch_jobs import forked
from topoplan.reading.pcie_tree import relation_matrix

PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))

NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
TIME = re.compile(r"(?<![\w.])\d+(\.\d+)?(e-\d+)? (us|ms|s)\b")
OF_A_SHELL = re.compile(r"[|<>;&$`*?~]|^topoplan (bench|testbed|calibrate)")
MEASURED = re.compile(r"^( *\d+ +\d+ +\w+ +\w+) .* (\d+)$")
"""A row of a bench: bytes, elements, type and reduction are fixed, and so is the number of wrong elements."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page, what should be printed, and why it is not run (empty if it is)."""

    line: int
    text: str
    printed: tuple[str, ...]
    reason: str


def commands(page: Path) -> list[Command]:
    found: list[tuple[int, str, list[str], str]] = []
    reason, fenced, inside = "", False, False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced, inside = not fenced, False
            continue
        body = line if fenced else line.removeprefix("    ") if line.startswith("    ") else None
        if body is None:
            told = NOT_RUN.fullmatch(line)
            if told or line.strip():
                reason, inside = told[1] if told else "", False
            elif inside:
                found[-1][2].append("")
            continue
        if body.startswith("$ "):
            found.append((number, body[2:].split("     #")[0].strip(), [], reason))
            inside = True
        elif inside:
            found[-1][2].append(body)
    return [
        Command(number, text, tuple("\n".join(lines).rstrip().splitlines()), why)
        for number, text, lines, why in found
    ]


def stable(line: str) -> str:
    row = MEASURED.match(line)
    return f"{row[1]} {row[2]}" if row else TIME.sub("T", line).rstrip()


def difference(wanted: tuple[str, ...], printed: list[str]) -> str:
    """Where the output is not what the page says; empty if it is."""
    place = 0
    skipping = False
    for line in wanted:
        if line.strip() == "…":
            skipping = True
            continue
        head = stable(line.removesuffix("…"))
        fits = (lambda text, head=head: text.startswith(head)) if line.endswith("…") else head.__eq__
        while skipping and place < len(printed) and not fits(stable(printed[place])):
            place += 1
        if place == len(printed) or not fits(stable(printed[place])):
            return f"the page says {line!r}, printed is {printed[place : place + 1] or 'nothing more'}"
        place += 1
        skipping = False
    return "" if skipping or place == len(printed) else f"printed is also {printed[place]!r}"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where ``topoplan`` and ``python`` are these, and ``nvidia-smi`` is that of a DGX-1V."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    names, cells = relation_matrix(topoplan.load("dgx-1v"))
    rows = [("", *names), *((name, *row) for name, row in zip(names, cells, strict=True))]
    matrix = "\n".join("\t".join(row) for row in rows).replace("gpu", "GPU").replace("nic", "mlx5_")
    scripts = {
        "topoplan": f'exec {shlex.quote(sys.executable)} -m topoplan "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "nvidia-smi": f"cat <<'END'\n{matrix}\nEND",
    }
    for name, text in scripts.items():
        (binaries / name).write_text(f"#!/bin/sh\n{text}\n")
        (binaries / name).chmod(0o755)
    path = f"{binaries}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page.stem == "README" else pytest.mark.thorough) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_the_commands_of_a_page_print_what_it_says(
    page: Path, environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Commands that need no shell and start no ranks run in this process, which has loaded everything."""
    folder = tmp_path / "here"
    folder.mkdir()
    # logs that pages read lie beside them
    (folder / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(folder)
    for name in ("PATH", "COLUMNS"):
        monkeypatch.setenv(name, environment[name])
    wrong = []
    for command in commands(page):
        if command.reason:
            continue
        if command.text.startswith("topoplan ") and not OF_A_SHELL.search(command.text):
            printed = "".join(run(*shlex.split(command.text)[1:])[1:])
        else:
            done = subprocess.run(
                ["bash", "-c", command.text], env=environment, capture_output=True, text=True
            )
            printed = done.stdout + done.stderr
        told = difference(command.printed, printed.splitlines())
        if told:
            wrong.append(f"{page.name}:{command.line}: {command.text}\n    {told}")
    assert not wrong, "\n".join(wrong)
    assert page != ROOT / "README.md" or len(page.read_text(encoding="utf-8").splitlines()) < 150


def test_links_of_pages_lead_to_files_and_headings() -> None:
    """Links, and paths of the repository between backquotes."""
    named = re.compile(r"`((?:topoplan|collectives|tests|docs|notebooks|topologies)/[\w/.-]+?\.\w+)`")
    texts = [(page, page.read_text(encoding="utf-8")) for page in PAGES]
    links = [
        (page, page.parent / (one or page.name), anchor)
        for page, text in texts
        for one, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    ]
    links += [(page, ROOT / one, "") for page, text in texts for one in named.findall(text)]
    assert [(page.name, str(target)) for page, target, _ in links if not target.exists()] == []
    wrong = [
        (page.name, f"{target.name}#{anchor}")
        for page, target, anchor in links
        if anchor and anchor not in anchors(target)
    ]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


HOW_TO = sorted(ROOT.glob("docs/questions/[0-9]*.md"))


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_how_to_page_begins_with_when_to_use_it_and_the_answer(page: Path) -> None:
    title, first = page.read_text(encoding="utf-8").split("\n\n")[:2]
    assert title.startswith("# ")
    assert first.startswith("Use this page ")
    # a sentence of when to use it, and one or two of the answer
    assert 2 <= len(re.findall(r"[.:](?:\s|$)", first)) <= 3


FOR_RANKS = re.compile(
    r"<!-- ranks: (\d+) -->\n\n```python\n(.*?)```\n\n```\n(.*?)```\n",
    re.DOTALL,
)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/concepts.md",
        "docs/quick-start.md",
        pytest.param("docs/python.md", marks=pytest.mark.thorough),
        pytest.param("docs/compression.md", marks=pytest.mark.thorough),
        pytest.param("docs/something-is-broken.md", marks=pytest.mark.thorough),
    ],
)
def test_python_on_a_page_gives_what_it_says(page: str) -> None:
    """An expression with a comment behind it has that value; ``…`` ends what is left out."""
    names: dict[str, object] = {}
    alone = FOR_RANKS.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for block in re.findall(r"```python\n(.*?)```", alone, re.DOTALL):
        for statement in ast.parse(block).body:
            text = ast.get_source_segment(block, statement) or ""
            wanted = re.match(r" *# (.*)", block.split(text, 1)[1].splitlines()[0])
            if isinstance(statement, ast.Expr) and wanted:
                told = repr(eval(text, names))
                assert told.startswith(wanted[1].removesuffix("…")), text
                assert wanted[1].endswith("…") or told == wanted[1], text
            else:
                exec(text, names)


PROGRAMS = [
    pytest.param(int(ranks), program, printed, id=f"{page.stem} {number}")
    for page in PAGES
    for number, (ranks, program, printed) in enumerate(FOR_RANKS.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "program", "printed"), PROGRAMS)
def test_python_for_several_ranks_prints_what_the_page_says(
    ranks: int, program: str, printed: str, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    file = tmp_path / "loop.py"
    file.write_text(program, encoding="utf-8")
    told, errors, statuses = forked([str(file)], tmp_path, ranks=ranks)
    assert statuses == [0] * ranks, errors[-3000:]
    assert sorted(filter(None, told.split("\n"))) == sorted(printed.splitlines()), errors[-3000:]


def test_the_examples_of_file_formats_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "file-formats.md").read_text(encoding="utf-8")
    found = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    trees = [value for value in found if value["format"] == "topoplan.trees/1"]
    machines = [value for value in found if value not in trees]
    assert {value["format"] for value in machines} == {"topoplan.topology/1", "topoplan.cluster/1"}
    path = tmp_path / "file.json"
    for value in machines:
        path.write_text(json.dumps(value))
        assert topoplan.load(path).gpus
    for value in trees:
        assert topoplan.plan_from_trees("dgx-1v", "allreduce", value["trees"], gpus=[1, 4, 5, 7]).rate > 0
    assert trees


VARIABLE = re.compile(r"RANK|[A-Z][A-Z0-9]*(_[A-Za-z0-9]+)+")
VALUES_NOT_VARIABLES = {"PCI_BUS_ID"}


MODULES = sorted((*ROOT.glob("topoplan/**/*.py"), *ROOT.glob("collectives/**/*.py")))


@functools.cache
def source_of(module: Path) -> str:
    return module.read_text(encoding="utf-8")


@functools.cache
def names_and_texts(module: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names and the texts of a module."""
    nodes = [*ast.walk(ast.parse(source_of(module)))]
    names = {str(getattr(node, kind, "")) for node in nodes for kind in ("id", "attr", "arg")}
    return frozenset(names), frozenset(str(node.value) for node in nodes if isinstance(node, ast.Constant))


def variables_in_the_source() -> set[str]:
    """Return the variables that the packages read or set: their names in modules that use the environment."""
    return {
        text
        for names, texts in (
            names_and_texts(one) for one in MODULES if re.search("environ|TOPOPLAN_", source_of(one))
        )
        for text in texts
        if VARIABLE.fullmatch(text)
        and (names & {"environ", "environment"} or text.startswith("TOPOPLAN_"))
        and text not in VALUES_NOT_VARIABLES
    }


def is_text_of_the_source(piece: str) -> bool:
    """Whether a text of the packages contains it; modules in whose source it stands in one line come first."""
    first = sorted(MODULES, key=lambda module: piece not in source_of(module))
    return any(piece in text for module in first for text in names_and_texts(module)[1])


def test_the_page_of_environment_variables_has_those_of_the_source() -> None:
    page = (ROOT / "docs" / "environment-variables.md").read_text(encoding="utf-8")
    tables = page.partition("and does not read")[0]
    names = [
        re.findall(r"`(\w+)`", row.split("|")[1]) for row in tables.splitlines() if row.startswith("| `")
    ]
    assert {name for row in names for name in row} == variables_in_the_source()


@pytest.mark.thorough
def test_the_messages_of_the_page_of_troubleshooting_are_those_of_the_source() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    tables = page.partition("\n## Errors")[2].partition("\n## Exit codes")[0]
    messages = [
        re.findall(r"`([^`]+)`", row.split("|")[1]) for row in tables.splitlines() if row.startswith("| `")
    ]
    pieces = [piece.strip() for row in messages for message in row for piece in message.split("…")]
    assert [piece for piece in pieces if not is_text_of_the_source(piece)] == []
    assert len(messages) > 20


def test_the_logs_of_the_pages_are_those_of_their_writers() -> None:
    """After a change: ``python -m tests.support.question_logs``."""
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert found == {name: INVENTED + text for name, text in LOGS.items()}


MEDIAN_WORDS, MOST_WORDS = 18, 40
UNWANTED = re.compile(r"\bis no (?!longer\b)|\bthose that\b|\bwhoever\b", re.IGNORECASE)
UNWANTED_START = re.compile(r"(?:Where|What|Of) ")


def paragraphs(page: Path) -> tuple[list[str], list[str]]:
    """Return the paragraphs and list items of a page, and the rows of its tables; code is one word."""
    prose: list[str] = [""]
    rows: list[str] = []
    fenced = False
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if fenced or line.startswith(("```", "    ", "#")) or not line.strip():
            prose.append("")
        elif line.startswith("|"):
            rows.append(without_code(line))
        else:
            if re.match(r" *(?:[-*+]|\d+\.) ", line):
                prose.append("")
            prose[-1] += " " + re.sub(r"^ *(?:[-*+]|\d+\.|>) +", "", line).strip()
    return [told for told in (without_code(one).strip() for one in prose) if told], rows


def without_code(text: str) -> str:
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))


def sentences(page: Path) -> list[str]:
    """Return the sentences of a page's prose: no code, tables or headings."""
    return [
        one
        for text in paragraphs(page)[0]
        for one in re.split(r"(?<=[.!?])[)*_\"]*\s+(?=\S)", text)
        if re.search(r"\w", one)
    ]


def complaints(page: Path) -> list[str]:
    """Return what is wrong with the language of a page."""
    found = sentences(page)
    lengths = [len(one.split()) for one in found] or [0]
    median = statistics.median(lengths)
    wrong = [f"median sentence of {median:g} words"] if median > MEDIAN_WORDS else []
    for sentence, words in zip(found, lengths, strict=False):
        if words > MOST_WORDS:
            wrong.append(f"{words} words: {sentence}")
        if UNWANTED_START.match(sentence.lstrip('*_"(')) and not sentence.endswith("?"):
            wrong.append(f"begins with {sentence.split()[0]!r}: {sentence}")
    for text in [*found, *paragraphs(page)[1]]:
        wrong += [f"{match[0]!r}: {text}" for match in UNWANTED.finditer(text)]
    return wrong


@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: page.stem,
)
def test_sentences_of_a_page_are_short_and_begin_with_their_subject(page: Path) -> None:
    assert complaints(page) == []


def test_prose_is_told_from_code_tables_and_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# What is it\n\nIt runs `a b c` as [told here](x.md). Whoever\nruns it.\n\n    Of no account\n\n"
        "- One item.\n- Where it ends.\n\n| there is no | those that |\n\n```\nwhoever\n```\n"
    )
    assert sentences(page) == [
        "It runs code as told here.",
        "Whoever runs it.",
        "One item.",
        "Where it ends.",
    ]
    assert [one.split(":")[0] for one in complaints(page)] == [
        "begins with 'Where'",
        "'Whoever'",
        "'is no '",
        "'those that'",
    ]


if __name__ == "__main__":
    for page in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
        lengths = [len(one.split()) for one in sentences(page)] or [0]
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        print(
            f"{name}: {len(lengths)} sentences, median {statistics.median(lengths):g}, longest {max(lengths)} words"
        )
        for told in complaints(page):
            print(f"    {told}")
