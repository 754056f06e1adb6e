"""The ``cpu`` elements of a topology file: NUMA nodes, their processors, and the rate between them."""

from __future__ import annotations

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import (
    Findings,
    GivenRates,
    needed,
    stated,
    stated_rate,
    whole_number,
)
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import HostCpu
from topoplan.hosts.nccl_rates import CPU_VENDORS, socket_bandwidth
from topoplan.topology import facts

_ASSUMED = -1_000_000
"""Added to a number that says nothing of the machine: nodes keep their order and stay apart, but count as unknown."""

MOST_NODES = 1024
"""Largest number of a NUMA node."""

MOST_CPUS = 256
"""NUMA nodes of a server; NCCL takes no more."""


def cpu_number(cpu: Element) -> int:
    """The NUMA node; below zero where it is not known.

    Raises
    ------
    TopologyError
        It is missing, or no such number.
    """
    text = needed(cpu, "numaid")
    number = whole_number(cpu, "numaid")
    if number is None or not -1 <= number <= MOST_NODES:
        raise TopologyError(
            f"line {cpu.line}: cpu numaid {text[:40]!r} is no number of a NUMA node from -1 to {MOST_NODES}"
        )
    return number if stated(cpu, "numaid") else number + _ASSUMED


def host_cpus(system: Element, rates: GivenRates, findings: Findings) -> tuple[HostCpu, ...]:
    """The NUMA nodes of one host, in ascending order.

    Raises
    ------
    TopologyError
        A node is there twice, or the nodes belong to several hosts.
    """
    elements: dict[int, Element] = {}
    hashes: dict[str, Element] = {}
    for cpu in system.all("cpu"):
        number = cpu_number(cpu)
        hashes.setdefault(cpu.attributes.get("host_hash", "").strip().lower(), cpu)
        if len(hashes) > 1:
            raise TopologyError(
                f"line {cpu.line}: cpu host_hash {cpu.attributes.get('host_hash', '')[:40]!r} is of another host than "
                f"line {next(iter(hashes.values())).line}; keep the cpu elements of one host"
            )
        if number in elements:
            raise TopologyError(
                f"line {cpu.line}: cpu numaid {needed(cpu, 'numaid')} is there twice, first in line "
                f"{elements[number].line}; a NUMA node is one cpu element"
            )
        elements[number] = cpu
    if len(elements) > MOST_CPUS:
        raise TopologyError(f"{len(elements)} cpu elements are more than the {MOST_CPUS} that NCCL takes")
    several = len(elements) > 1
    return tuple(
        _host_cpu(number, elements[number], rates, findings, several=several) for number in sorted(elements)
    )


def _host_cpu(number: int, cpu: Element, rates: GivenRates, findings: Findings, *, several: bool) -> HostCpu:
    arch, vendor = cpu.attributes.get("arch", ""), cpu.attributes.get("vendor", "")
    family, model = whole_number(cpu, "familyid"), whole_number(cpu, "modelid")
    socket = rates.socket or stated_rate(cpu, "socket")
    if socket is None:
        socket = socket_bandwidth(arch, vendor, family or 0, model or 0)
        unknown = arch not in ("x86_64", "arm64", "ppc64") or (
            arch == "x86_64" and (vendor not in CPU_VENDORS or (vendor != "AuthenticAMD" and model is None))
        )
        if unknown and several:
            findings.add(
                f"the processor is unknown or not stated; {socket:g} GB/s between CPUs taken (--socket-gbps sets it)",
                f"cpu {needed(cpu, 'numaid')}",
            )
    return HostCpu(
        number,
        socket,
        stated(cpu, "model"),
        facts(
            arch=stated(cpu, "arch"),
            vendor=stated(cpu, "vendor"),
            family=family if stated(cpu, "familyid") else None,
            model=model if stated(cpu, "modelid") else None,
            cpus=_cpu_list(cpu, findings),
        ),
        stated(cpu, "name"),
    )


def _cpu_list(cpu: Element, findings: Findings) -> str:
    """Logical CPUs such as 0-19,40-59 from words of 32 bits in hexadecimal, the highest first."""
    text = stated(cpu, "affinity")
    try:
        words = [int(word, 16) for word in text.split(",")] if text else []
    except ValueError:
        words = [-1]
    if not all(0 <= word < 1 << 32 for word in words):
        findings.add(
            "affinity is no mask such as 00000000,000fffff; left out", f"cpu {needed(cpu, 'numaid')}"
        )
        return ""
    bits = [32 * i + bit for i, word in enumerate(reversed(words)) for bit in range(32) if word >> bit & 1]
    spans: list[list[int]] = []
    for bit in bits:
        if spans and bit == spans[-1][1] + 1:
            spans[-1][1] = bit
        else:
            spans.append([bit, bit])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
