"""Write a plan or a machine as a file for another program (``export``) or as one HTML page (``report``)."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from shlex import quote

from topoplan.cli import arguments
from topoplan.cli.machine_options import (
    add_all_options,
    apply_cluster_options,
    apply_faults,
    apply_overlay,
)
from topoplan.cli.output import (
    Answer,
    check_target,
    note_lines,
    plan_notes,
    print_notes,
    progress_line,
    write_whole,
)
from topoplan.cli.plan_cluster import root_rank
from topoplan.cli.sources import (
    BY_KIND_COMMANDS,
    large_cluster,
    may_be_large,
    read_machine,
    read_plan_or_machine,
    refuse_listing,
    refuse_unread,
    server_number,
)
from topoplan.engines.exported import Choices, Exported, one_server
from topoplan.engines.msccl_write import RUNTIMES
from topoplan.engines.nccl.environment_file import nccl_environment
from topoplan.engines.nccl.identities import BUS_ID_QUERY, parse_bus_ids, with_bus_ids
from topoplan.engines.registry import FORMATS, check_format, export_machine, export_plan, how_to_use
from topoplan.errors import TopologyError, UsageError
from topoplan.machine.faults_by_kind import named_servers
from topoplan.machine.topology import Topology
from topoplan.reading.load import read_text


def add_options(parser: arguments.OneLineParser) -> None:
    arguments.add_machine(parser, or_plan=True)
    arguments.declare(
        parser,
        f"""
        --to FORMAT  {", ".join(FORMATS)}: see topoplan help formats
        -o F         write the file (default: stdout)
        """,
        to={"required": True},
    )
    arguments.add_allocation(parser)
    arguments.declare(
        parser,
        f"""
        --server NAME   server of a cluster, such as s0
        --bus-ids FILE  with nccl-topo, bus ids of the GPUs if the machine states none: the output of
                        {BUS_ID_QUERY}
        """,
    )
    arguments.declare(
        parser.topic("export"),
        """
        --size S                size of the buffer, such as 256MB
        --max-blocks B          most thread blocks of a GPU
        --chunks C              chunks of the buffer (default: as the fractions need, or within 1 %% of the rate)
        --chunk C               longest chunk of a trace
        --protocol {simple,ll}  simple: signals beside the data; ll: flags in packets, for small buffers (default:
                                simple)
        --runtime               limits to keep in files for MSCCL (default: msccl)
        """,
        size={"type": arguments.size, "dest": "nbytes"},
        max_blocks=arguments.whole_number(1, 1024, "number of thread blocks from 1 to 1024"),
        chunks=arguments.whole_number(1, 1 << 20, "number of chunks above zero"),
        chunk=arguments.size,
        runtime={"choices": sorted(RUNTIMES)},
    )
    add_all_options(parser)
    parser.examples = (
        "topoplan export dgx-1v --gpus 0-3 --to nccl-graph -o graph.xml",
        "topoplan export plan.json --to mscclpp -o mscclpp.json",
        "topoplan export topo.txt --to nccl-topo --bus-ids bus-ids.csv -o topo.xml",
    )


def run(options: argparse.Namespace) -> Answer | int:
    """Write a plan (verified first) or a machine as a file that another program reads."""
    check_format(options.to)
    with progress_line("exporting"):
        exported, source_notes = export_file(options)
    notes = (*exported.notes, *_usage_lines(options))
    if not exported.files:
        to_file = options.output not in (None, "-")
        return Answer(
            file=lambda: exported.text,
            text=(lambda: note_lines(*notes)) if to_file else None,
            notes=source_notes if to_file else (*source_notes, *notes),
        )
    if options.output in (None, "-"):
        raise UsageError(f"{options.to} is {len(exported.files)} files here; name them with -o")
    stem = str(Path(options.output).with_suffix(""))
    names = [stem + end for end, _ in exported.files]
    for name, (_, content) in zip(names, exported.files, strict=True):
        check_target(name, "-o")
        write_whole(name, content)
    print(f"written: {names[0]} to {names[-1]}, {len(names)} files")
    print_notes(*source_notes, *notes)
    return 0


def export_file(options: argparse.Namespace) -> tuple[Exported, tuple[str, ...]]:
    """Return the exported file, and the notes of the plan or machine."""
    arguments.refuse_without(options, {"bus_ids": "--to nccl-topo"})
    if options.bus_ids == "-" == options.topo:
        raise UsageError("stdin is read once; give --bus-ids a file")
    made = _file_by_kind(options)
    if made is not None:
        return made
    source = read_plan_or_machine(options)
    choices = _choices(options)
    if isinstance(source, Topology):
        refuse_unread(options, source)
        described = apply_cluster_options(options, apply_overlay(options, source), gpus=options.gpus)
        machine = apply_faults(options, described)
        gpus = machine.allocation(options.gpus)
        # a machine's file has no ranks, and so no order of the GPUs
        allocation = machine.whole.subset(None if gpus is None else sorted(gpus))
        if options.bus_ids is not None:
            allocation = _with_bus_ids(allocation, options)
        return export_machine(allocation, options.to, server=options.server), allocation.notes
    if options.bus_ids is not None:
        plan = source.plans[0]
        source = replace(plan, topology=_with_bus_ids(plan.topology, options))
    return export_plan(source, options.to, choices), tuple(plan_notes(source))


def _file_by_kind(options: argparse.Namespace) -> tuple[Exported, tuple[str, ...]] | None:
    """Return the topology of a server of a large cluster, or the environment that all its servers have; else None."""
    of_server = options.to == "nccl-topo" and options.server is not None
    if not (of_server or options.to == "nccl-env") or options.gpus is not None or options.bus_ids is not None:
        return None
    cluster = large_cluster(options, ())
    if cluster is None:
        return None
    if cluster.network.kind == "torus":
        from topoplan.plans.plan_by_kind import MOST_LISTED_GPUS

        if cluster.size > MOST_LISTED_GPUS:
            raise UsageError(
                f"{options.to} of a torus needs the list of its GPUs, at most {MOST_LISTED_GPUS:,}, got "
                f"{cluster.size:,}; export it for fewer servers"
            )
        return None
    if of_server:
        number = server_number(cluster, options.server, "--server")
        cluster.place(number)
        beside = named_servers(cluster, (f"s{number}.",)).topology
        return export_machine(beside, options.to, server=options.server), cluster.notes
    few = cluster.sample(2).topology
    texts = {nccl_environment(few, server=name).text for name in few.servers}
    if len(texts) > 1:
        return None
    if options.server is not None:
        cluster.place(server_number(cluster, options.server, "--server"))
    return nccl_environment(few), cluster.notes


def _with_bus_ids(machine: Topology, options: argparse.Namespace) -> Topology:
    path: str = options.bus_ids
    try:
        known = parse_bus_ids(read_text(path, f"save the output of {BUS_ID_QUERY}"))
        return with_bus_ids(one_server(machine, options.server, "a topology file of NCCL"), known)
    except (UsageError, TopologyError) as error:
        raise UsageError(f"--bus-ids {path}: {error}") from None


def _usage_lines(options: argparse.Namespace) -> tuple[str, ...]:
    """Return lines that say how another program is made to read the file."""
    if options.output in (None, "-"):
        return how_to_use(options.to, _choices(options))
    path = Path(options.output)
    places = []
    for place in (path, path.parent):
        below = "" if place == Path() else f"/{quote(str(place))}"
        places.append(quote(str(place)) if path.is_absolute() else f"$PWD{below}")
    return how_to_use(options.to, _choices(options), file=places[0], folder=places[1])


def _choices(options: argparse.Namespace) -> Choices:
    return Choices(
        size=options.nbytes,
        max_blocks=options.max_blocks,
        chunks=options.chunks,
        chunk=options.chunk,
        protocol=options.protocol,
        runtime=options.runtime,
    )


MOST_REPORTED = 512
"""GPUs of a cluster up to which a report lists them: about a minute. The report of more GPUs is by kind."""


def add_report_options(parser: arguments.OneLineParser) -> None:
    parser.usage = "topoplan report TOPO -o F.html [options]"
    arguments.add_machine(parser)
    arguments.declare(parser, "-o F.html  write the page there; - prints it (required)")
    arguments.add_allocation(parser)
    arguments.add_collective(parser)
    arguments.add_root(parser)
    arguments.add_channels(parser, with_size=False)
    arguments.add_sizes(parser, "1KB:1GB")
    add_all_options(parser, in_network=True)
    parser.examples = (
        "topoplan report dgx-1v -o report.html",
        "topoplan report topo.txt --gpus 0-3 -o report.html",
        "topoplan report v100x4 --collective all_gather -o report.html",
    )


def run_report(options: argparse.Namespace) -> Answer:
    """Write one HTML file: the machine, its health, which GPUs to choose, the plan, its proof and trees, and times."""
    if options.output is None:
        raise UsageError("report needs an output file; give one with -o, such as -o report.html")
    by_kind = _report_by_kind(options)
    if by_kind is not None:
        return Answer(file=lambda: by_kind)
    refuse_listing(options, MOST_REPORTED, "a report", f"choose some with --gpus; {BY_KIND_COMMANDS}")
    machine = read_machine(options)
    from topoplan.operate.plot.page import report_page

    with progress_line("reporting") as progress:
        page = report_page(
            machine.whole,
            options.collective,
            gpus=machine.allocation(options.gpus),
            free=machine.left if options.without_gpu else None,
            root=options.root,
            channels=options.channels,
            sizes=options.sizes,
            progress=progress,
        )
    return Answer(file=lambda: page)


def _report_by_kind(options: argparse.Namespace) -> str | None:
    """Return the page of a cluster of more GPUs than `MOST_REPORTED`; None for all that is listed."""
    if not may_be_large(options):
        return None
    cluster = large_cluster(options, ("gpus", "in_network"))
    if cluster is None or cluster.size <= MOST_REPORTED:
        return None
    from topoplan.operate.plot.page_by_kind import report_by_kind

    with progress_line("reporting") as progress:
        return report_by_kind(
            cluster,
            options.collective,
            root=root_rank(options),
            channels=options.channels,
            sizes=options.sizes,
            progress=progress,
        )
