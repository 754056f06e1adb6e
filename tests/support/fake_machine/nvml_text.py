"""A machine as the text that the fake NVML answers from (its format: ``machine_text.c``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from tests.support.fake_machine.description import FakeMachine, Gpu, Nvlink, Pci, Root

OK, CHIPSET_NOT_SUPPORTED, GPU_NOT_SUPPORTED, TOPOLOGY_NOT_SUPPORTED, DISABLED_BY_KEY, NOT_SUPPORTED = range(
    6
)

_TYPES = {"gpu": 0, "cpu": 1, "switch": 2, "unknown": 255}
_HIDDEN = "FFFFFFF:FFFF:FF.0"

# Field ids: speed in MB/s of links 0 to 5 and 6 to 11, the common one, how many links; then, per link as scope, speed,
# state and version, which only newer generations answer; then of C2C: count, status, MB/s.
_SPEEDS = (*range(84, 90), *range(132, 138))
_COMMON_SPEED, _LINK_COUNT, _LINK_SPEED, _LINK_STATE, _LINK_VERSION = 90, 91, 164, 165, 166
_C2C_COUNT, _C2C_STATUS, _C2C_SPEED = 170, 171, 172
C2C_MEGABYTES = 44712


def nvml_text(machine: FakeMachine) -> str:
    return "\n".join(_lines(machine)) + "\n"


def nvml_bus_id(busid: str) -> str:
    return f"0000{busid}".upper()


def _lines(machine: FakeMachine) -> Iterator[str]:
    yield f"driver {machine.driver}"
    yield f"nvml {machine.cuda // 1000}.{machine.driver}"
    yield f"cuda {machine.cuda}"
    places = machine.places()
    for index, gpu in enumerate(machine.gpus):
        yield "gpu"
        yield from _identity(machine, gpu, index, *places[gpu.busid])
        yield from _links(gpu)
        yield from _field_lines(gpu)
    for a, b in permutations(range(len(machine.gpus)), 2):
        yield f"p2p {a} {b} {' '.join(map(str, _peer_status(machine, a, b)))}"
        yield f"ancestor {a} {b} {common_ancestor(machine, a, b)}"
    for rule in machine.rules:
        yield f"fail {rule}"


def _identity(
    machine: FakeMachine, gpu: Gpu, index: int, root: Root, chain: tuple[Pci, ...]
) -> Iterator[str]:
    pci = chain[-1]
    vendor, device, sub_vendor, sub_device = pci.ids.split(":")
    yield f"  name {gpu.name}"
    yield f"  uuid GPU-{machine.uuid(gpu.busid)}"
    yield f"  bus {nvml_bus_id(gpu.busid)}"
    yield f"  pci 0x{device}{vendor} 0x{sub_device}{sub_vendor}"
    yield f"  minor {index}"
    yield f"  capability {gpu.capability[0]} {gpu.capability[1]}"
    if pci.generation:
        now = pci.current_generation or pci.generation
        yield f"  pcie {pci.generation} {pci.width} {now} {pci.width}"
    yield f"  pstate {gpu.pstate}"
    if gpu.memory_node >= 0:
        yield f"  numa {gpu.memory_node}"
    yield f"  near {root.numa}"
    yield f"  affinity {machine.cpus.near(root.numa)}"
    if gpu.mig:
        yield f"  mig {' '.join(map(str, gpu.mig))}"
    for number, name in enumerate(gpu.instances):
        yield f"  instance MIG-{machine.uuid(f'{gpu.busid} {number}')} {name}"
    if gpu.capability >= (9, 0):
        yield f"  c2c {int(gpu.c2c_links > 0)}"
    yield f"  fabric {' '.join(map(str, gpu.fabric))} {'0' * 32}"


def _links(gpu: Gpu) -> Iterator[str]:
    for link in gpu.links:
        remote = _HIDDEN if link.remote == "hidden" else nvml_bus_id(link.remote)
        # Capabilities: peer access, system memory access, peer atomics, system memory atomics, SLI bridge, valid.
        yield f"  link {int(link.up)} {gpu.nvlink_version} {_TYPES[link.kind]} {remote} 1 1 1 1 0 1"


def _field_lines(gpu: Gpu) -> Iterator[str]:
    if gpu.links:
        yield f"  field {_LINK_COUNT} * 1 {len(gpu.links)}"
        speeds = [link.megabytes for link in gpu.links if link.up]
        if speeds:
            yield f"  field {_COMMON_SPEED} * 1 {max(speeds)}"
    for number, link in enumerate(gpu.links):
        speed = link.megabytes if link.up else 0
        if number < len(_SPEEDS):
            yield f"  field {_SPEEDS[number]} * 1 {speed}"
        if gpu.capability >= (9, 0):
            yield f"  field {_LINK_SPEED} {number} 1 {speed}"
            yield f"  field {_LINK_STATE} {number} 1 {int(link.up)}"
            yield f"  field {_LINK_VERSION} {number} 1 {gpu.nvlink_version}"
    if gpu.c2c_links:
        yield f"  field {_C2C_COUNT} * 1 {gpu.c2c_links}"
    for number in range(gpu.c2c_links):
        yield f"  field {_C2C_STATUS} {number} 1 1"
        yield f"  field {_C2C_SPEED} {number} 1 {C2C_MEGABYTES}"


def common_ancestor(machine: FakeMachine, a: int, b: int) -> int:
    """``nvmlGpuTopologyLevel_t`` of two GPUs: what a transfer over PCIe has to cross."""
    places = machine.places()
    root, chain = places[machine.gpus[a].busid]
    other_root, other_chain = places[machine.gpus[b].busid]
    if root.numa != other_root.numa:
        return 50
    if root != other_root:
        return 40
    shared = sum(x == y for x, y in zip(chain, other_chain, strict=False))
    if not shared:
        return 30
    # On one switch, only a port and the GPU itself are below the last device that both share.
    return 10 if len(chain) == len(other_chain) == shared + 2 else 20


def _peer_status(machine: FakeMachine, a: int, b: int) -> tuple[int, int, int, int, int]:
    """Read, write, NVLink, atomics, PCIe properties."""
    for first, second, status in machine.refused:
        if {a, b} == {first, second}:
            return (status, status, NOT_SUPPORTED, NOT_SUPPORTED, NOT_SUPPORTED)
    if any(gpu.mig and gpu.mig[0] for gpu in (machine.gpus[a], machine.gpus[b])):
        return (NOT_SUPPORTED,) * 5
    same_socket = common_ancestor(machine, a, b) < 50
    pcie = OK if same_socket or machine.p2p_across_sockets else TOPOLOGY_NOT_SUPPORTED
    if _joined(machine.gpus[a], machine.gpus[b]):
        return (OK, OK, OK, OK, pcie)
    return (pcie, pcie, NOT_SUPPORTED, NOT_SUPPORTED, pcie)


def _joined(first: Gpu, second: Gpu) -> bool:
    """Whether NVLink joins two GPUs: directly, or both at a switch."""

    def up(gpu: Gpu) -> list[Nvlink]:
        return [link for link in gpu.links if link.up]

    if any(link.remote == second.busid for link in up(first)):
        return True
    far = [{link.remote for link in up(gpu) if link.kind in ("switch", "unknown")} for gpu in (first, second)]
    return bool(far[0] and far[1])
