"""Judge the runs of a log in one sentence, and say what to do next after a diagnosis.

A run is judged by its fastest row that bandwidth binds, and by its larger sizes. A row is as expected if it reaches the
published rates of such machines (`topoplan.operate.compare.published_rates`). Without any it is if it reaches
`OF_MODEL` of NCCL's expected rate at that size, or `OF_LINKS` of NCCL's best schedule on the stated links: NVLS
reaches about 60 % of its links and 90 % of its model on a healthy H100, and an NVLink carries 70 to 95 % of its nominal
rate. A slow run is compared with the limits of other transports first (`Likely`), since each has causes of its own.
Steps are ordered by how often each cause is the one, and by how fast it is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

from topoplan.machine.hardware import compute_capability
from topoplan.machine.small_machines import SMALL_MACHINES
from topoplan.machine.topology import Topology
from topoplan.operate.compare.comparison import BANDWIDTH
from topoplan.operate.compare.judged_log import ABOVE, JudgedRow, JudgedRun
from topoplan.operate.compare.nccl_debug_run import NcclRun
from topoplan.operate.compare.published_rates import OF_NORMAL, NormalRate, normal_rate
from topoplan.operate.faults import Fault
from topoplan.reading.load import library, load
from topoplan.reading.nccl.perf_text import LoggedRank
from topoplan.units import format_size

OF_MODEL, OF_LINKS = 0.8, 0.7
"""Least part of the rate of NCCL's model, and of its best schedule on the links, that a healthy run reaches."""

DEBUG_SETTINGS = "NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,TUNING"
"""Settings with which NCCL logs what it set up and which algorithm it chose."""

MOST_STEPS = 5
"""Most steps for findings alone."""

VerdictKind = Literal[
    "wrong results", "another machine", "slow", "small sizes only", "not judged", "as expected"
]
KINDS: tuple[VerdictKind, ...] = get_args(VerdictKind)
"""Kinds of a verdict, most serious first."""

OF_RING = 0.6
"""Least part of a ring's or tree's rate that a run without NVLS reaches, if nothing else is wrong."""


@dataclass(frozen=True, slots=True)
class Likely:
    """The transport whose limit fits a slow run, and a sentence with the figures."""

    kind: Literal["pcie", "no nvls"]
    text: str


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The verdict on a run: its kind, a sentence, the row that decides, and the published rates at its size.

    Both are None without a usable row, ``normal`` without figures of such a machine too.
    """

    kind: VerdictKind
    text: str
    row: JudgedRow | None = None
    normal: NormalRate | None = None
    wrong_model: bool = False
    likely: Likely | None = None


def judge_run(one: JudgedRun, machine: Topology) -> RunVerdict:
    """Return the verdict on a run on a machine."""

    @cache
    def normal(row: JudgedRow) -> NormalRate | None:
        return normal_rate(row, machine, one.gpus, one.model)

    found = _judged(one, normal)
    return replace(found, normal=normal(found.row)) if found.row else found


def _judged(one: JudgedRun, normal: Callable[[JudgedRow], NormalRate | None]) -> RunVerdict:
    wrong = [row for row in one.rows if row.row.wrong]
    usable = [row for row in one.rows if not row.row.wrong and row.reachable and row.row.size]
    found = f"wrong results in {len(wrong)} of {len(one.rows)} rows"
    if one.run.failed and not wrong:
        found = "wrong results: nccl-tests found values out of bounds"
    if not usable:
        kind: VerdictKind = "wrong results" if wrong or one.run.failed else "not judged"
        return RunVerdict(kind, found if kind == "wrong results" else "no row to judge")
    binding = [row for row in usable if row.bound_by == BANDWIDTH]
    top = max(binding or usable, key=lambda row: row.rate)
    reached = _reached(top, normal(top))
    if wrong or one.run.failed:
        return RunVerdict("wrong results", f"{found}, {reached}", top)
    if one.model:
        return RunVerdict(
            "another machine",
            f"the log ran on {one.model}, another machine than this{_of_model(top, normal(top))}",
            top,
            wrong_model=True,
        )
    if top.of_best is None:
        return RunVerdict("not judged", "a single rank sends nothing", top)
    if top.of_best > ABOVE:
        why = (
            "the bound leaves in-network reduction out"
            if _in_network_explains(top)
            else "another machine ran, or its links are faster"
        )
        return RunVerdict("another machine", f"{reached}: {why}", top)
    if one.run.program == "bench":
        text = f"not judged: {reached}; topoplan bench measures this host, not the links"
        return RunVerdict("not judged", text, top)
    if not binding:
        text = f"small sizes only: {reached}; latency binds, run larger sizes"
        return RunVerdict("small sizes only", text, top)
    # a run may be fast at one size and collapse at larger ones
    slow = [row for row in binding if row.row.size >= top.row.size and not _healthy(row, normal(row))]
    if not slow:
        return RunVerdict("as expected", f"as expected: {reached}", top)
    worst = min(slow, key=lambda row: (_of_links(row), -row.row.size))
    return RunVerdict("slow", f"slow: {_reached(worst, normal(worst))}", worst, likely=_likely(worst))


def _of_model(row: JudgedRow, normal: NormalRate | None) -> str:
    """Return the published rates of the model that ran beside a row's; empty without any."""
    if normal is None or row.reachable is None:
        return ""
    return f"; normal for it: {normal.text}, measured {row.rate * row.reachable.factor:.4g}"


def _healthy(row: JudgedRow, normal: NormalRate | None) -> bool:
    if normal is not None and normal.same and row.reachable:
        return normal.healthy(row.rate * row.reachable.factor)
    return _of_links(row) >= OF_LINKS or (row.of_expected or 0.0) >= OF_MODEL


def _of_links(row: JudgedRow) -> float:
    """Return the part of NCCL's best schedule on the links, else of the upper bound."""
    return (row.of_best if row.of_nccl is None else row.of_nccl) or 0.0


def _likely(row: JudgedRow) -> Likely | None:
    """Return the transport whose limit fits a slow row, or None."""
    found = row.reachable
    limits = [(name, rate * found.factor) for name, rate in found.nccl] if found else []
    plain = [(name, limit) for name, limit in limits if not name.startswith("nvls")]
    if found is None or not plain:
        return None
    busbw, (name, limit) = row.rate * found.factor, plain[0]
    named = {"nvlink ring": "an NVLink ring", "network ring": "a network ring", "nccl tree": "NCCL's tree"}
    of_limit = f"{percent(busbw / limit)} of {named.get(name, name)}'s {limit:.4g}"
    if found.pcie and busbw <= found.pcie < limit / 2:
        part = percent(busbw / found.pcie)
        text = f"PCIe or host memory: busbw {busbw:.4g} is {part} of PCIe's {found.pcie:.4g}, {of_limit}"
        return Likely("pcie", text)
    if len(plain) < len(limits) and OF_RING * limit <= busbw <= limit:
        what = "a ring" if "ring" in name else "a tree"
        why = "NVLS did not run (NCCL_NVLS_ENABLE=0? no nvidia-fabricmanager?)"
        return Likely("no nvls", f"{what}: busbw {busbw:.4g} is {of_limit}; {why}")
    return None


def _in_network_explains(row: JudgedRow) -> bool:
    """Return whether a row above the upper bound is below the one with in-network reduction."""
    beyond = row.reachable.in_network if row.reachable else None
    return beyond is not None and row.rate <= beyond * ABOVE


def percent(part: float) -> str:
    """Return a part of a rate in percent.

    >>> percent(0.0613), percent(0.987), percent(1.069)
    ('6.1 %', '99 %', '107 %')
    """
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


def _reached(row: JudgedRow, normal: NormalRate | None) -> str:
    """Return the bandwidth of a row beside published rates, else its part of the upper bound, or of NCCL's model."""
    factor = row.reachable.factor if row.reachable else 1.0
    text = (
        f"{'algbw' if factor == 1 else 'busbw'} {row.rate * factor:.4g} GB/s at {format_size(row.row.size)}"
    )
    if row.bound_by != BANDWIDTH and row.reachable and row.expected_time and row.of_expected:
        return f"{text}, {percent(row.of_expected)} of that expected by {row.reachable.expected_by(row.expected_time)}"
    part = f"{text}, {percent(row.of_best or 0.0)} of the upper bound"
    if normal is None or (row.of_best or 0.0) > ABOVE:
        return part
    if normal.same:
        return f"{text}; normal for this machine: {normal.text} (slow below {OF_NORMAL * normal.low:.4g})"
    return f"{part}; normal on {normal.rates[0].servers} servers: {normal.text}"


def log_steps(
    verdicts: Sequence[RunVerdict],
    nccl: NcclRun | None,
    *,
    command: str,
    servers: int,
    ranks: Iterable[LoggedRank] = (),
    healthy: bool = False,
) -> tuple[str, ...]:
    """Return the next steps after the verdicts on a log, most likely cause first.

    command: the machine as the commands take it, such as ``dgx-h100``.
    healthy: the description of the machine that ran shows all its NVLinks.
    ranks: the ranks that ran, which tell the machine.
    """
    kind = min((one.kind for one in verdicts), key=KINDS.index, default="not judged")
    found = _finding_steps(nccl, command) if nccl is not None else []
    if kind == "wrong results":
        return (
            "do not use these GPUs: results are wrong; dcgmi diag -r 3 tests memory and links",
            "dmesg | grep -i xid names the GPU",
        )
    if kind == "another machine":
        if any(one.row and one.kind == kind and _in_network_explains(one.row) for one in verdicts):
            return ("--in-network nvswitch in place of none",)
        own = (
            "nvidia-smi topo -m > topo.txt on the machine that ran, then --machine topo.txt; if that is the machine "
            "given, set the bandwidths that its notes assume"
        )
        fitting = machine_for(ranks)
        return (own, f"or {fitting}") if fitting and any(one.wrong_model for one in verdicts) else (own,)
    if kind == "small sizes only":
        return ("run sizes up to 8 GB, where bandwidth binds: -b 1K -e 8G -f 2",)
    if kind != "slow":
        without = "run all_reduce_perf of nccl-tests on all GPUs" if kind == "not judged" and verdicts else ""
        return tuple(found[:MOST_STEPS]) or (without or "nothing to do",)
    slow = [one for one in verdicts if one.kind == "slow" and one.row is not None]
    references = [one.row.reachable for one in slow if one.row and one.row.reachable]
    nvls = any(one.nccl and one.nccl[0][0].startswith("nvls") for one in references)
    likely = {one.likely.kind if one.likely else None for one in slow}
    several = len(likely) > 1 or None in likely
    asked = [(_PEER_STEP, True), (_NVLS_STEP, nvls)]
    if not several:
        asked = [(_PEER_STEP, "pcie" in likely), (_NVLS_STEP, "no nvls" in likely)]
    causes = [text for text, wanted in asked if wanted and not found]
    again = (
        [f"run again with {DEBUG_SETTINGS}; topoplan explain reads those lines too"] if nccl is None else []
    )
    others = {
        "is an NVLink missing? topoplan check, on the machine that ran": several and not healthy,
        "is a NIC unused? NCCL_IB_HCA, ibv_devinfo, nvidia-peermem": servers > 1 and not found,
        f"are the ranks in a bad order? topoplan order {command}": servers > 1,
        f"is one link slow? topoplan pairs {command}": several,
    }
    ordered = (*again, *causes) if several else (*causes, *again)
    return (*found[:3], *ordered, *(text for text, wanted in others.items() if wanted))


_PEER_STEP = "is peer access off, or SHM the transport? NCCL_P2P_DISABLE; nvidia-smi topo -p2p r; ACS"
_NVLS_STEP = "is NVLS off? NCCL_NVLS_ENABLE; nvidia-fabricmanager; Fabric State of nvidia-smi -q is Completed"


_OF_FINDING = {
    "p2p": "give the GPUs peer access: ACS off, one container for all; nvidia-smi topo -p2p r shows the pairs",
    "shm": "give the GPUs peer access: ACS off, one container for all; nvidia-smi topo -p2p r shows the pairs",
    "net inside": "let ranks of a host see each other: one /dev/shm, one network namespace, the same NCCL_HOSTID",
    "no ib": "let NCCL see the NICs: ibv_devinfo in the container, NCCL_IB_HCA",
    "socket": "let NCCL see the NICs: ibv_devinfo in the container, NCCL_IB_HCA",
    "no gdr": "let NICs read GPU memory: nvidia-peermem or DMA-BUF, NCCL_NET_GDR_LEVEL",
    "no nvls": "start the fabric manager (nvidia-fabricmanager), and leave NCCL_NVLS_ENABLE unset",
    "ring without link": "give NCCL rings over NVLink: topoplan export {command} --to nccl-graph, NCCL_GRAPH_FILE",
    "few channels": "leave NCCL_MAX_NCHANNELS and NCCL_MAX_CTAS unset, or raise NCCL_MIN_NCHANNELS",
    "warning": "read the lines of NCCL's warnings in the log",
}
"""Next step by the kind of a finding, likely causes first."""


def _finding_steps(nccl: NcclRun, command: str) -> list[str]:
    """Return the steps for findings in NCCL's log; a setting comes first, since others may follow from it."""
    kinds = {finding.kind for finding in nccl.findings}
    named = [finding.text.split(" ")[0] for finding in nccl.findings if finding.kind == "setting"]
    steps = [f"unset {one.partition('=')[0]} (it is {one.partition('=')[2]}), and run again" for one in named]
    if any(one.startswith(("NCCL_P2P_", "NCCL_SHM_")) for one in named):
        kinds -= {"p2p", "shm", "ring without link", "few channels"}
    if any(one.startswith("NCCL_IB_DISABLE") for one in named):
        kinds -= {"no ib", "socket"}
    return [
        *steps,
        *dict.fromkeys(text.format(command=command) for kind, text in _OF_FINDING.items() if kind in kinds),
    ]


def machine_for(ranks: Iterable[LoggedRank]) -> str:
    """Return the option that names the library machine on which ranks of a log ran, with why; empty for none.

    >>> ranks = [LoggedRank(n, 0, "node1", n, f"0000:0{n}:00", "NVIDIA H100 80GB HBM3") for n in range(8)]
    >>> machine_for(ranks)
    '--machine dgx-h100 (8 x NVIDIA H100 80GB HBM3 on one host)'
    """
    hosts: dict[str, set[object]] = {}
    models = set()
    for rank in ranks:
        hosts.setdefault(rank.host, set()).add(rank.busid or rank.device)
        models.add(rank.model)
    counts = {len(devices) for devices in hosts.values()}
    model = models.pop() if len(models) == 1 else ""
    if not model or not counts:
        return ""
    most = max(counts)
    where = "one host" if len(hosts) == 1 else f"each of {len(hosts)} hosts"
    found = next(_fitting(model, most), None)
    if found is None:
        return ""
    cluster = "" if len(hosts) == 1 else f" --servers {len(hosts)}{_nic_option(found)}"
    return f"--machine {found.name}{cluster} ({most} x {model} on {where})"


def _fitting(model: str, gpus: int) -> Iterator[Topology]:
    """Yield library machines with GPUs of a model's generation and as many of them, or more; the closest first."""
    sm, on_board = compute_capability(model), "PCIe" not in model
    machines = [load(name) for name in library() if name not in SMALL_MACHINES] if sm else []
    fit = [
        machine
        for machine in machines
        if len(machine.gpus) >= gpus
        and compute_capability(machine.device(machine.gpus[0]).model) == sm
        and any(link.channel == "nvlink" for link in machine.links) == on_board
    ]
    yield from sorted(fit, key=lambda machine: (len(machine.gpus) - gpus, not machine.name.startswith("dgx")))


def _nic_option(machine: Topology) -> str:
    names = {device.model for device in machine.devices if device.kind == "nic"}
    speeds = {match[1] for name in names if (match := re.search(r"(\d+) Gb/s", name))}
    return f" --nic-bandwidth {speeds.pop()}Gb/s" if len(speeds) == 1 else " --nic-bandwidth RATE"


_OF_FAULT = {
    "no NVLink": "nvidia-smi nvlink --status and systemctl status nvidia-fabricmanager; then reset the GPU",
    "link missing": "nvidia-smi nvlink --status names dead links; reset the GPU (nvidia-smi -r), else reseat it",
    "link one-way": "nvidia-smi nvlink --status on both ends; reset both GPUs",
    "link slow": "nvidia-smi nvlink --errorcounters counts replays; topoplan pairs measures the link",
    "fewer NVLinks": "nvidia-smi nvlink --status names links that are down",
    "PCIe missing": "lspci -tv shows what the bus has; reseat the card",
    "PCIe slow": "lspci -vv: LnkSta below LnkCap means a card that trained low; reseat it, or set the slot in the BIOS",
    "PCIe one-way": "the description is wrong in one direction: measure with topoplan calibrate",
    "NIC missing": "lspci and ibv_devinfo on this host; reseat the NIC",
    "NIC far": "compare the slots with another host of this kind (lspci -tv)",
    "NUMA": "check the BIOS's NUMA setting and the slot of the card",
    "MIG": "nvidia-smi -i GPU -mig 0 gives whole GPUs back",
    "no peer access": "switch ACS off, and run all ranks of a host in one container; nvidia-smi topo -p2p r",
    "unreachable": "no link of this description joins these GPUs: take a new one (topoplan probe)",
    "row missing": "take the listing again, as a whole: nvidia-smi topo -m",
    "told": "read the warning; dmesg | grep -i xid",
}
"""Next step by the kind of a fault."""


def fault_steps(faults: Iterable[Fault]) -> tuple[str, ...]:
    """Return the next steps for faults of a machine, one for each kind.

    >>> fault_steps([Fault("MIG", ("gpu0",), "in MIG mode", "a whole GPU")])
    ('gpu0: nvidia-smi -i GPU -mig 0 gives whole GPUs back',)
    >>> fault_steps([Fault("told", (), "JACCL refuses these cables", "nothing to warn of")])
    ('read the warning',)
    """
    of_step: dict[str, list[Fault]] = {}
    for fault in faults:
        # A warning on no device is not about a GPU, so no log of a GPU explains it.
        step = _OF_FAULT[fault.kind] if fault.where else "read the warning"
        of_step.setdefault(step, []).append(fault)
    steps = []
    for text, found in of_step.items():
        where = found[0].where if len(found[0].where) <= 40 else f"{found[0].where[:39]}…"
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        steps.append(f"{where}{more}: {text}" if where else text)
    return tuple(steps)
