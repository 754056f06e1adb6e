"""The GPUs of a topology file: their numbers, and where their NVLinks or XGMI links lead.

The rate of a link is NCCL's, by compute capability, or RCCL's, by architecture (see `topoplan.hosts.nccl_rates`). An
element ``nvlink`` or ``xgmi`` stands for links that lead from this GPU to one far end; the far end has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import (
    Findings,
    GivenRates,
    needed,
    stated,
    stated_rate,
    whole_number,
)
from topoplan.formats.nccl.pci import PciNode, device_kind
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import HostGpu, NvlinkBundle, bus_id, bus_id_order
from topoplan.hosts.nccl_rates import gcn_name, nvlink_bandwidth, xgmi_bandwidth
from topoplan.topology import FASTEST, MOST_WIRES, facts
from topoplan.units import exact, nearest_float

_HIDDEN = "fffffff:"
"""Beginning of the target that NCCL writes for a far end which a virtual machine cannot see: a switch."""

NO_NVLINKS = "no gpu element, so that NVLinks are not known; --merge adds them from another description"


def host_gpus(nodes: Sequence[PciNode], rates: GivenRates, findings: Findings) -> tuple[HostGpu, ...]:
    """The GPUs among the ``pci`` elements, in ascending order of their numbers.

    Raises
    ------
    TopologyError
        An attribute without which NCCL fails is missing, or a number is out of range.
    """
    ends = {node.device.busid: node.device.kind for node in nodes}
    gpus = []
    elements = [node for node in nodes if node.device.kind == "gpu"]
    for number, node in _numbered(elements, findings):
        parts = node.element.all("gpu")
        if not parts:
            findings.add(NO_NVLINKS, node.device.busid)
            gpus.append(_host_gpu(number, node, Element("gpu", node.element.line), ()))
            continue
        gpu = parts[0]
        if len(parts) > 1:
            findings.add(
                "is divided into several gpu elements; the first stands for all of it", node.device.busid
            )
        bundles = _Bundles(node.device.busid, ends, rates, findings).read(gpu)
        gpus.append(_host_gpu(number, node, gpu, bundles, c2c=_c2c(gpu, findings, node.device.busid)))
    ranked = [
        bool(node.element.all("gpu") and "rank" in node.element.all("gpu")[0].attributes) for node in elements
    ]
    if any(ranked):
        for node, has_rank in zip(elements, ranked, strict=True):
            if not has_rank:
                findings.add("has no rank, so that NCCL leaves the GPU out; kept", node.device.busid)
    return tuple(gpus)


def _numbered(nodes: Sequence[PciNode], findings: Findings) -> list[tuple[int, PciNode]]:
    """Numbers by ``dev``, else as the driver counts: by bus id."""
    numbers = [whole_number(gpu, "dev") for node in nodes for gpu in node.element.all("gpu")[:1]]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(set(known)) == len(nodes):
        if sorted(known) != list(range(len(nodes))):
            findings.add(
                "numbers of GPUs are their dev; options such as --gpus count the GPUs of the file from 0"
            )
        return sorted(zip(known, nodes, strict=True), key=lambda pair: pair[0])
    if nodes:
        findings.add("GPUs are numbered by bus id, as the driver counts: dev is not stated, or there twice")
    return list(enumerate(sorted(nodes, key=lambda node: bus_id_order(node.device.busid))))


def _host_gpu(
    number: int, node: PciNode, gpu: Element, bundles: tuple[NvlinkBundle, ...], *, c2c: float = 0.0
) -> HostGpu:
    gcn = stated(gpu, "gcn")
    # On an AMD GPU ``sm`` is the number of its compute units.
    amd = "gcn" in gpu.attributes or gpu.all("xgmi") or whole_number(node.element, "vendor") == 0x1002
    sm = whole_number(gpu, "sm") if stated(gpu, "sm") and not amd else None
    return HostGpu(
        node.device.busid,
        number,
        node.device.model,
        bundles,
        c2c,
        facts(sm=sm, gcn=gcn_name(gcn)),
        node.device.name,
    )


def _c2c(gpu: Element, findings: Findings, busid: str) -> float:
    """GB/s per direction of the chip-to-chip link to the CPU; NCCL states MB/s of one link."""
    total = Fraction(0)
    for link in gpu.all("c2c"):
        rate = exact(stated_rate(link, "bandwidth") or 0.0)
        if not rate:
            needed(link, "bw")
            needed(link, "count")
            rate = Fraction((whole_number(link, "bw") or 0) * (whole_number(link, "count") or 0), 1000)
        if 0 < rate <= exact(FASTEST):
            total += rate
        else:
            findings.add("c2c with a bw or count that is none above zero; left out", busid)
    return nearest_float(total)


class _Bundles:
    """Reader of the ``nvlink`` and ``xgmi`` elements of one GPU; equal far ends are one bundle."""

    def __init__(self, busid: str, ends: Mapping[str, str], rates: GivenRates, findings: Findings) -> None:
        self.busid = busid
        self.ends = ends
        self.rates = rates
        self.findings = findings

    def read(self, gpu: Element) -> tuple[NvlinkBundle, ...]:
        sums: dict[tuple[str, str], tuple[int, Fraction]] = {}
        for link in gpu.all("nvlink", "xgmi"):
            needed(link, "count")
            count = whole_number(link, "count") or 0
            if count > MOST_WIRES:
                raise TopologyError(
                    f"line {link.line}: {link.name} count {count} is too large; no GPU has more than {MOST_WIRES} links"
                )
            if count < 1:
                self.findings.add(f"{link.name} with a count that is none above zero; left out", self.busid)
                continue
            end = self._far_end(link)
            links, bandwidth = sums.get(end, (0, Fraction(0)))
            sums[end] = (links + count, bandwidth + self._bandwidth(link, gpu, count))
        return tuple(NvlinkBundle(*end, count, nearest_float(rate)) for end, (count, rate) in sums.items())

    def _far_end(self, link: Element) -> tuple[str, str]:
        """Kind of the far end as `NvlinkBundle` has it, and its bus id where it is a GPU."""
        target = link.attributes.get("target", "").strip().lower()
        kind = device_kind(link.attributes.get("tclass", ""))
        if kind in ("cpu", "nvswitch"):
            return kind, ""
        if target.startswith(_HIDDEN):
            return "nvswitch", ""
        try:
            target = bus_id(target)
        except TopologyError:
            target = target[:40]
        if kind == "gpu":
            needed(link, "target")
            return "gpu", target
        if self.ends.get(target) == "gpu":
            return "gpu", target
        if self.ends.get(target) != "nvswitch":
            self.findings.add(
                f"{link.name} to {target or 'no target'} of unknown class; taken as an NVSwitch, as NCCL does",
                self.busid,
            )
        return "nvswitch", ""

    def _bandwidth(self, link: Element, gpu: Element, count: int) -> Fraction:
        given = stated_rate(link, "bandwidth")
        if self.rates.nvlink is not None:
            return count * exact(self.rates.nvlink)
        if given is not None:
            return exact(given)
        if link.name == "xgmi":
            gcn = gpu.attributes.get("gcn", "")
            if not gcn:
                self.findings.add(
                    f"gcn is not stated; {xgmi_bandwidth(''):g} GB/s taken for an XGMI link", self.busid
                )
            return count * exact(xgmi_bandwidth(gcn))
        sm = whole_number(gpu, "sm")
        if sm is None:
            self.findings.add(
                f"sm is not stated; {nvlink_bandwidth(80):g} GB/s taken for an NVLink (--nvlink-gbps sets it)",
                self.busid,
            )
        return count * exact(nvlink_bandwidth(80 if sm is None else sm))
