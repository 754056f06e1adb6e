"""Machines drawn at random, probed through the genuine nvidia-ml-py: what went in comes out."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from itertools import combinations

import pytest

import topoplan
from tests.support.fake_machine.description import (
    GPU_3D,
    INFINIBAND,
    Cpus,
    FakeMachine,
    Gpu,
    Nic,
    Nvlink,
    Pci,
    Root,
    pcie_switch,
)
from tests.support.fake_machine.fixtures import Installer
from topoplan.reading.pcie_tree import relation_matrix

LANE = {3: 0.75, 4: 1.5, 5: 3.0}


class Drawn:
    """A machine, and what the probe should find: codes and PCIe rates by GPU, NVLinks by pair."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.nodes = choose.choice([1, 2])
        self.place: list[tuple[int, int, int]] = []
        self.rates: list[float] = []
        self.nics = 0
        roots = []
        adapters = []
        for node in range(self.nodes):
            for _ in range(choose.choice([1, 2])):
                number = len(roots)
                ports = [
                    self._port(choose, number, port, node, adapters) for port in range(choose.choice([1, 2]))
                ]
                roots.append(Root(f"{number:04x}:00", node, tuple(ports)))
        self.wires = self._wires(choose)
        self.dead = {pair: choose.randint(0, 1) for pair in self.wires if choose.random() < 0.2}
        self.machine = FakeMachine(
            name=f"drawn{seed}",
            cpus=Cpus(
                "AuthenticAMD",
                "AMD EPYC 7742 64-Core Processor",
                23,
                49,
                ("0-7", "8-15")[: self.nodes],
                ((10, 32), (32, 10))[: self.nodes],
            ),
            roots=tuple(roots),
            gpus=tuple(self._gpu(i) for i in range(len(self.place))),
            nics=tuple(Nic(busid, f"mlx5_{i}", "200 Gb/sec (4X HDR)") for i, busid in enumerate(adapters)),
        )

    def _port(self, choose: random.Random, root: int, port: int, node: int, adapters: list[str]) -> Pci:
        """A root port with a switch of two or three devices, GPUs and perhaps a NIC."""
        bus = 16 * port + 1
        generation, width = choose.choice([3, 4, 5]), choose.choice([8, 16])
        below = {}
        for slot in range(choose.choice([2, 3])):
            lanes = choose.choice([4, 8, 16])
            busid = f"{root:04x}:{bus + 2 + slot:02x}:00.0"
            gpu = slot < 2
            kind = ("10de:20b0:10de:134f", GPU_3D) if gpu else ("15b3:101b:15b3:0007", INFINIBAND)
            below[f"{root:04x}:{bus + 1:02x}:{slot:02x}.0"] = Pci(busid, *kind, generation, lanes)
            if gpu:
                self.place.append((node, root, port))
                self.rates.append(lanes * LANE[generation])
            else:
                adapters.append(busid)
        switch = pcie_switch(
            f"{root:04x}:{bus:02x}:00.0", "10b5:8764:10b5:8764", below, generation=generation, width=width
        )
        return Pci(
            f"{root:04x}:00:{port + 1:02x}.0",
            "1022:1483:0000:0000",
            generation=5,
            width=16,
            children=(switch,),
        )

    def _wires(self, choose: random.Random) -> dict[tuple[int, int], int]:
        free = dict.fromkeys(range(len(self.place)), 12)
        wires: Counter[tuple[int, int]] = Counter()
        for pair in combinations(free, 2):
            count = min(choose.choice([0, 0, 1, 2, 4]), *(free[gpu] for gpu in pair))
            for gpu in pair:
                free[gpu] -= count
            wires[pair] += count
        return {pair: count for pair, count in wires.items() if count}

    def _gpu(self, number: int) -> Gpu:
        links = []
        for pair, count in self.wires.items():
            if number in pair:
                far = sum(pair) - number
                down = self.dead.get(pair, 0)
                links += [Nvlink(self.busid(far), "gpu", 25000, up=i >= down) for i in range(count)]
        return Gpu(self.busid(number), "NVIDIA A100-SXM4-40GB", (8, 0), 4, tuple(links))

    def busid(self, number: int) -> str:
        _, root, port = self.place[number]
        slot = sum(place == self.place[number] for place in self.place[:number])
        return f"{root:04x}:{16 * port + 3 + slot:02x}:00.0"

    def code(self, first: int, second: int) -> str:
        """As `nvidia-smi topo -m` would print it."""
        up = self.wires.get((first, second), 0) - self.dead.get((first, second), 0)
        if up:
            return f"NV{up}"
        one, two = self.place[first], self.place[second]
        return "PIX" if one == two else "PHB" if one[:2] == two[:2] else "NODE" if one[0] == two[0] else "SYS"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_what_was_drawn_is_found(fake_here: Installer, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of all pairs, NVLinks that are up at both ends, PCIe rates; and the machine can be planned."""
    drawn = Drawn(seed)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        fake_here(drawn.machine)
        machine = topoplan.probe()
    size = len(drawn.place)
    names, cells = relation_matrix(machine, ("gpu",))
    assert names == tuple(f"gpu{i}" for i in range(size))
    for first, second in combinations(range(size), 2):
        assert cells[first][second] == drawn.code(first, second)
    pcie = {link.src: link.bandwidth for link in machine.links if link.channel == "pcie"}
    assert [pcie[name] for name in names] == drawn.rates
    plan = topoplan.plan(machine)
    assert topoplan.verify(plan).optimal
