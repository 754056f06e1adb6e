"""``topoplan calibrate`` on the GPUs that are there: run by ``make test-gpu``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from collectives.lab.peer_copies import PeerCopies, visible_bus_ids
from topoplan.cli.main import main
from topoplan.errors import ProbeError
from topoplan.machine.topology import Device, Topology
from topoplan.operate.calibration.calibrated_topology import calibrated

pytestmark = pytest.mark.gpu

SIZES = tuple(1 << power for power in range(16, 29, 2))


@pytest.fixture(scope="module")
def shown() -> Topology:
    """The GPUs that CUDA shows, by bus id, and no wires: what a copy is timed at does not depend on them."""
    cupy = pytest.importorskip("cupy", reason="calibrate needs CuPy")
    try:
        buses = visible_bus_ids(cupy)
    except ProbeError as error:
        pytest.skip(str(error))
    devices = tuple(Device(f"gpu{i}", "gpu", "s0", busid=bus) for i, bus in enumerate(buses))
    return Topology("this machine", devices, ())


def test_copies_between_all_gpus_fit_a_line(shown: Topology) -> None:
    """Rates that hardware can have, and medians within a quarter of their line; of one GPU its memory."""
    found = PeerCopies().measure(shown, gpus=None, sizes=SIZES, repeats=9, progress=None)
    count = len(shown.gpus)
    assert len(found.pairs) == count * (count - 1)
    if count == 1:
        assert found.memory is not None
        assert 10 < found.memory.bandwidth < 20_000
    for pair in calibrated(shown, found, date="2026-11-21").pairs:
        assert 0.5 < pair.fit.line.bandwidth < 2000
        assert pair.fit.line.alpha < 1e-3
        assert pair.fit.line.distance < 0.25
    assert all(0 < seconds < 60 for _, seconds in found.peer_access)


def test_the_command_writes(shown: Topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From ``topoplan probe`` to a topology with today's source or, of one GPU, a note on its memory."""
    path = tmp_path / "measured.json"
    assert main(["calibrate", "--sizes", "64KB:64MB", "--repeats", "5", "--json", "-o", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    made = topoplan.load(path)
    assert made.source.startswith("calibrated ")
    assert len(told["pairs"]) == len(made.gpus) * (len(made.gpus) - 1)
    assert any(note.startswith("calibrated: ") for note in made.notes)
