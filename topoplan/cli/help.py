"""Print the pages of ``topoplan --help`` and ``topoplan help``: topics, and all options of a command.

``COMMAND --help`` has the options that most runs need. The others belong to a topic, which is a group of options of the
command's parser (`OneLineParser.topic`): one of `TOPICS`, or the command itself.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from topoplan.cli.arguments import OneLineParser
from topoplan.cli.main import command_parsers, wrap_line
from topoplan.errors import UsageError

WIDTH = 79
"""Columns of a page."""

TASKS = {
    "diagnose a machine": ("explain", "check", "pairs", "diff"),
    "choose GPUs and ranks": ("recommend", "order", "compare"),
    "plan a collective": ("plan", "verify", "simulate", "export", "report"),
    "run a plan": ("bench", "testbed", "calibrate"),
    "machines": ("list", "show", "probe"),
}
"""Commands by task; all others are under "other commands"."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A page of ``topoplan help``: its line in the list of topics, its text before the options, and its examples."""

    line: str
    text: Callable[[], str] | str
    examples: tuple[str, ...] = ()


def _format_words() -> str:
    from topoplan.engines.registry import FORMATS

    return "\n".join(wrap_line(f"  {name:<11} {found.line}", WIDTH) for name, found in FORMATS.items())


def _preset_words() -> str:
    from topoplan.operate.mesh_placement import PRESETS

    return _MESH + "\n".join(
        f"  {name}  {', '.join(f'{axis} {weight}' for axis, weight in weights.items())}"
        for name, weights in PRESETS.items()
    )


_MACHINE = """\
TOPO is one of
  dgx-h100              machine of the library; topoplan list prints all
  bcube:4,2  torus:3,3  network of this shape
  fat-tree:4@10         the same with links of 10 GB/s
  topo.txt              output of nvidia-smi topo -m, rocm-smi --showtopo or
                        amd-smi topology
  topo.xml              file of NCCL_TOPO_DUMP_FILE, or for NCCL_TOPO_FILE
  machine.json          topology JSON (topoplan probe -o, topoplan show --json)
                        or cluster JSON
  -                     one of these files on stdin
The content of a file decides its format.

nvidia-smi text and XML do not state the rates of links. The rates of the GPU's
generation are assumed and noted, unless options give them. A rate has a unit:
GB/s (bytes) or Gb/s (bits), also MB/s, TB/s, Gbit/s and Gbps."""

_CLUSTER = """\
--servers N joins N servers of TOPO by a network. GPU numbers run through all
servers: 0-7 on the first DGX, 8-15 on the second. Servers that differ need a
file of the format topoplan.cluster/1."""

_FAULTS = """\
The machine is used without the parts that are removed, and with the rates of
its slow links. Every option may be repeated."""

_PLOT = """\
--plot F.png draws a figure. The suffix decides the format: .png, .svg or .pdf.
The same figure gives the same bytes."""

_CHANNELS = """\
--channels CH chooses the links that a plan may use.
  auto            NVLink if it connects the GPUs, else NVLink islands with the
                  PCIe between them, else PCIe; over servers with the network,
                  for the GPUs of each server
  nvlink          NVLink only
  pcie            PCIe only
  nvlink+network  NVLink in servers, the network between them
  pcie+network    PCIe in servers, the network between them
  nvlink+pcie     the buffer is divided between a tree packing over NVLink and
                  one over PCIe; PCIe has the higher latency and gets less of
                  small buffers (--size)
  all             one tree packing over NVLink and PCIe
  all-staged      as all, but PCIe only through the memory of the CPUs, without
                  switching peer access
  all+network, all-staged+network
                  the same in servers, the network between them"""

_MESH = """\
The groups of a mesh share links. plan plans them at once; order places their
ranks. The weights of the axes decide both: an axis of weight 40 moves 40 times
the bytes of an axis of weight 1. plan takes equal weights by default. order
does not guess weights and needs --axes or --preset, such as --preset megatron,
which keeps tp inside the server.

presets of order:
"""

_EXIT_CODES = """\
  0      success; explain ends with 0 for a slow log too: "verdict" of --json
  1      a check failed: check found a fault that costs bandwidth or cannot be
         rated, diff a difference, pairs --results a slow link, verify a wrong
         plan, bench or testbed a wrong element; or a process of a running
         collective failed
  2      bad usage or bad input; one line on stderr says what to do
  128+n  ended by signal n: 130 after Ctrl-C (SIGINT), 143 after SIGTERM, 129
         after SIGHUP"""

TOPICS = {
    "machine": Topic(
        "forms of TOPO, rates of links, in-network reduction",
        _MACHINE,
        (
            "topoplan plan topo.txt --nvlink-bandwidth 25GB/s",
            "topoplan plan torus:3,3@12.5",
            "topoplan plan dgx-h100 --in-network none",
        ),
    ),
    "cluster": Topic(
        "several servers: NICs, network, transport",
        _CLUSTER,
        (
            "topoplan plan dgx-a100 --servers 2 --nic-bandwidth 200Gb/s",
            "topoplan compare dgx-1v --servers 2 --nic-bandwidth 25GB/s --nics 1",
            "topoplan plan v100x4 --servers 2 --nic-bandwidth 25Gb/s --transport tcp",
        ),
    ),
    "faults": Topic(
        "machines with failed or slow parts",
        _FAULTS,
        (
            "topoplan plan dgx-1v --without-gpu 3",
            "topoplan check dgx-1v --without-link gpu0-gpu3 --slow-link gpu1-gpu2=12.5GB/s",
            "topoplan show dgx-1v --without-device nic0",
        ),
    ),
    "plot": Topic(
        "figures of --plot (also: help figures)",
        _PLOT,
        (
            "topoplan show dgx-1v --plot machine.png",
            "topoplan plan dgx-1v --gpus 0-3 --plot trees.pdf --plot-size 6x4 --font serif",
        ),
    ),
    "channels": Topic(
        "links that a plan may use: NVLink, PCIe, network",
        _CHANNELS,
        (
            "topoplan plan dgx-1v --gpus 1,4,5,7 --channels pcie",
            "topoplan plan dgx-1v --gpus 1,4,5,7 --channels nvlink+pcie --size 64MB",
        ),
    ),
    "mesh": Topic(
        "axes of parallelism and their weights",
        _preset_words,
        (
            "topoplan plan dgx-a100 --mesh dp=2,tp=4",
            "topoplan plan dgx-a100 --mesh dp=2,tp=4 --axes dp=1,tp=8",
            "topoplan order dgx-a100 --mesh dp=2,tp=4 --preset megatron",
        ),
    ),
    "formats": Topic(
        "files that export writes for other programs",
        _format_words,
        (
            "topoplan export dgx-1v --gpus 0-3 --to nccl-graph -o graph.xml",
            "topoplan export dgx-1v --to nccl-topo -o topo.xml",
            "topoplan export plan.json --to dot -o trees.dot",
        ),
    ),
    "exit-codes": Topic("0, 1, 2 and 128+n", _EXIT_CODES),
}
"""Pages by name; the options of a page are those of all commands with this topic."""

SYNONYMS = {"figures": "plot", "exit": "exit-codes", "presets": "mesh", "rates": "machine"}


def list_commands(lines: Mapping[str, str]) -> str:
    """Return the page of ``topoplan --help``; ``lines`` are those of all commands."""
    known = {name for names in TASKS.values() for name in names}
    tasks = {**TASKS, "other commands": tuple(name for name in lines if name not in known)}
    page = [
        "usage: topoplan COMMAND [options]",
        "",
        "Plan collective communication on the links of a machine, prove an",
    ]
    page += ["upper bound on its bandwidth, and run it.", ""]
    for task, names in tasks.items():
        page.append(f"{task}:")
        page += [wrap_line(f"  {name:<11} {lines[name]}", WIDTH) for name in names if name in lines]
    page += [
        "",
        "examples:",
        "  topoplan explain nccl-tests.log --machine topo.txt",
        "  topoplan recommend dgx-1v --count 4",
        "  topoplan plan dgx-1v --gpus 1,4,5,7",
        "",
        "options of a command: topoplan COMMAND --help; topics: topoplan help",
    ]
    return "\n".join(page) + "\n"


def add_options(parser: OneLineParser) -> None:
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help=f"a command, or {', '.join(TOPICS)}")
    parser.examples = ("topoplan help", "topoplan help cluster", "topoplan help plan")


def run(options: argparse.Namespace) -> int:
    """Print the topics, the page of a topic, or all options of a command."""
    commands = command_parsers()
    name = SYNONYMS.get(options.topic, options.topic)
    if name is None:
        page = _list_topics()
    elif name in TOPICS:
        page = _topic_page(name, commands)
    elif name in commands:
        page = commands[name].format_help(full=True)
    else:
        near = difflib.get_close_matches(name, (*TOPICS, *SYNONYMS, *commands), n=1)
        hint = f"did you mean {near[0]}?" if near else f"use a command, or {', '.join(TOPICS)}"
        raise UsageError(f"topic {name[:40]!r} is unknown; {hint}")
    sys.stdout.write(page)
    return 0


def _list_topics() -> str:
    lines = ["usage: topoplan help TOPIC", "", "topics:"]
    lines += [f"  {name:<11} {topic.line}" for name, topic in TOPICS.items()]
    lines += ["  COMMAND     all options of a command, such as topoplan help plan", ""]
    return "\n".join([*lines, "topoplan --help lists the commands.", ""])


def _topic_page(name: str, commands: Mapping[str, OneLineParser]) -> str:
    """Return the text of a topic, its options of all commands, and its examples."""
    topic = TOPICS[name]
    text = topic.text if isinstance(topic.text, str) else topic.text()
    takers = [command for command, parser in commands.items() if name in parser.topics]
    found = {
        action.option_strings[0]: action
        for command in takers
        for action in commands[command].topics[name]._group_actions
        if action.help != argparse.SUPPRESS
    }
    formatter = argparse.HelpFormatter(f"topoplan help {name}")
    formatter.start_section("options")
    formatter.add_arguments(found.values())
    formatter.end_section()
    parts = [f"{name}: {topic.line}", text, formatter.format_help().strip("\n")]
    if topic.examples:
        parts.append("\n".join(["examples:", *(f"  {line}" for line in topic.examples)]))
    if takers:
        parts.append(wrap_line(f"commands:  {', '.join(takers)}", WIDTH))
    return "\n\n".join(part for part in parts if part) + "\n"
