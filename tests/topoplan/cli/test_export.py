"""``export``: what goes to stdout, to stderr and into a file; ``verify`` of the files of engines."""

from __future__ import annotations

from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Done, Run
from tests.support.nccl_rules import nccl_channels, nccl_links, read_as_nccl
from tests.topoplan.cli.conftest import PAIR, Told
from topoplan.engines.registry import FORMATS


@pytest.fixture
def ring_file(tmp_path: Path) -> str:
    path = tmp_path / "ring.json"
    path.write_text(topoplan.ring_plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2, 3]).to_json())
    return str(path)


def test_the_file_goes_to_stdout_and_notes_to_stderr(run: Run) -> None:
    """So that the text can be piped into a file; nobody knows where it goes, so the notes leave the place open."""
    status, out, err = run("export dgx-1v --to nccl-topo")
    assert status == 0
    assert len(nccl_links(read_as_nccl(out))) == 48 // 3 * 2 + 2 * (8 + 4 + 4) + 2
    assert err.startswith("note: bus ids are invented")
    assert all(line.startswith("note: ") for line in err.splitlines())
    assert "note: to use it: export NCCL_TOPO_FILE=FILE (NCCL 2.6 or later, and RCCL)\n" in err


def test_a_file_is_written_whole_and_notes_go_to_stdout(run: Run, done: Done, tmp_path: Path) -> None:
    """The same text as on stdout."""
    path = tmp_path / "graph.xml"
    status, out, err = run(f"export dgx-1v --to nccl-graph --gpus 1,4,5,7 -o {path}")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"written: {path}"
    rates = "rings 33.3333 GB/s, chains 50 GB/s; trees packed over NVLink, which NCCL cannot run, 50"
    assert f"note: AllReduce: {rates}" in out
    assert path.read_text() == done("export dgx-1v --to nccl-graph --gpus 7,5,4,1")
    assert nccl_channels(read_as_nccl(path.read_text(), most_nodes=4096), {1, 4, 5, 7})


def test_a_broken_machine_keeps_the_numbers_of_its_gpus(done: Done) -> None:
    """GPU 4 stays dev 4 when GPU 3 dies, and a dead NVLink is not in the file; text of nvidia-smi gets its speeds."""
    part = "export dgx-1v --to nccl-topo --without-gpu 3"
    out, whole = done(f"{part} --without-link gpu0-gpu4"), done(part)
    assert [line.split('"')[1] for line in out.splitlines() if "<gpu " in line] == [*"0124567"]
    assert whole.count("<nvlink") - out.count("<nvlink") == 2
    out = done("export - --to nccl-topo --nvlink-bandwidth 20GB/s", stdin=PAIR)
    assert out.count('count="2" tclass="0x030200" bandwidth="40.0"') == 2


def test_a_plan_file_is_exported_from_stdin_too(run: Run, done: Done, ring_file: str) -> None:
    """A plan of rings is the ring graph; its machine is the topology file, cut down to its GPUs."""
    status, out, err = run("export - --to nccl-graph", stdin=Path(ring_file).read_text())
    assert status == 0
    assert out == done(f"export {ring_file} --to nccl-graph")
    assert "rings of the plan:" in err
    assert done(f"export {ring_file} --to nccl-topo").count("<gpu ") == 4


def test_every_format_is_in_the_help(done: Done) -> None:
    words = " ".join(done("help formats").replace("-\n", "-").split())
    assert all(name in words for name in FORMATS)
    assert "cannot run packed trees inside a server" in words


def test_plans_that_nccl_cannot_run_are_refused(refused: Done, ring_file: str) -> None:
    """Wrong ones, packed trees, and plans by size."""
    machine = topoplan.load("dgx-2")
    for text, says in (
        (Path(ring_file).read_text().replace('"share": "', '"share": "1', 1), "wrong plan"),
        (topoplan.plan(machine).to_json(), "cannot run packed trees"),
        (
            topoplan.plan_by_size(machine, "broadcast").to_json(),
            "has 2 plans by size, and nccl-graph holds one",
        ),
    ):
        assert says in refused("export - --to nccl-graph", stdin=text)


def test_a_plan_of_several_servers_is_sent_to_their_machine(refused: Done) -> None:
    """A plan file takes no --server. Formats that plans alone have hold several servers."""
    text = topoplan.plan(topoplan.nvswitch_cluster(2, gpus=4), "allgather").to_json()
    for to in (name for name, found in FORMATS.items() if found.of_machine and not found.many_servers):
        assert refused(f"export - --to {to}", stdin=text) == (
            f"topoplan export: error: this plan spans 2 servers, and {to} describes one; export the machine with "
            "--server, or a plan for one server\n"
        )


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("nccl-graph", "NCCL_GRAPH_FILE=$PWD/below/f  |  Search 0 : … channels loaded from XML graph"),
        ("nccl-topo", "NCCL_TOPO_FILE=$PWD/below/f  |  NCCL_TOPO_FILE set by environment  |  topoplan diff"),
        ("mscclpp", "MSCCLPP_EXECUTION_PLAN_DIR=$PWD/below,  |  libmscclpp_nccl.so"),
        ("msccl-xml", "MSCCL_XML_FILES=$PWD/below/f NCCL_ALGO=MSCCL,RING,TREE  |  Connected 1 MSCCL"),
        ("msccl-xml --runtime rccl", "MSCCL_ALGO_DIR=$PWD/below RCCL_MSCCL_FORCE_ENABLE=1"),
        ("dot", ""),
    ],
)
def test_the_last_notes_say_how_to_have_the_file_used(
    to: str, told: str, done: Done, ring_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, with the place of the file from wherever the command ran, and what the engine prints then."""
    folder = Path(ring_file).parent
    (folder / "below").mkdir()
    monkeypatch.chdir(folder)
    lines = done(f"export {ring_file} --to {to} -o below/f").splitlines()
    use = [place for place, line in enumerate(lines) if line.startswith("note: to use it: ")]
    assert len(use) == (1 if told else 0)
    assert all(any(text in line for line in lines) for text in told.split("  |  "))
    assert all("export " in lines[place] for place in use)
    assert all(len(line) <= 120 for place in use for line in lines[place:])
    assert "to use it" not in Path("below/f").read_text()


BUSES = ("06", "07", "0A", "0B", "85", "86", "89", "8A")
LISTED = [f"{number}, 00000000:{bus}:00.0" for number, bus in enumerate(BUSES)]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    path = tmp_path / "ids.csv"
    path.write_text("\n".join(LISTED))
    return path


@pytest.mark.parametrize(
    "text",
    [
        "index, pci.bus_id\n" + "\n".join(LISTED) + "\n",
        "\n".join(LISTED),
        "name, pci.bus_id, index\n" + "\n".join("Tesla, {1}, {0}".format(*one.split(", ")) for one in LISTED),
    ],
    ids=["head", "no head", "other columns"],
)
def test_bus_ids_of_nvidia_smi_go_into_the_topology_file(text: str, run: Run, done: Done, ids: Path) -> None:
    """As the kernel writes them; the allocation takes those of its GPUs, and nothing is invented for a GPU."""
    ids.write_text(text)
    status, out, err = run(f"export dgx-1v --to nccl-topo --bus-ids {ids}")
    assert status == 0
    assert [f'<pci busid="0000:{bus}:00.0"' in out for bus in ("06", "0a", "8a")] == [True] * 3
    assert "bus ids are invented" not in err
    out = done(f"export dgx-1v --gpus 1,4 --to nccl-topo --bus-ids {ids}")
    assert [f'busid="0000:{bus}:00.0"' in out for bus in ("06", "07", "85")] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no GPU is listed"),
        ("\n".join(LISTED[:3]), "index 3 is missing, which is gpu3 (and 4 more)"),
        ("\n".join([*LISTED, LISTED[0]]), "line 9: index 0 occurs twice"),
        ("\n".join([*LISTED, "9, 00000000:06:00.0"]), "line 9: bus id 0000:06:00.0 occurs twice"),
        ("0, nowhere", "'nowhere' is not a bus id"),
        ("x0, 00000000:06:00.0", "'x0' is not an index"),
        ("0", "has no index and bus id"),
        ("index, name\n0, Tesla", "lacks index or pci.bus_id"),
    ],
)
def test_a_wrong_list_of_bus_ids_is_one_line(text: str, told: str, refused: Done, ids: Path) -> None:
    ids.write_text(text)
    assert told in refused(f"export dgx-1v --to nccl-topo --bus-ids {ids}")


def test_bus_ids_belong_to_topology_files_of_machines_without_any(
    refused: Done, done: Done, ids: Path
) -> None:
    """A graph file has none, and a machine that states its own is not told others."""
    assert "belongs to --to nccl-topo" in refused(f"export dgx-1v --to nccl-graph --bus-ids {ids}")
    made = done(f"export dgx-1v --to nccl-topo --bus-ids {ids}")
    ids.write_text("\n".join(LISTED).replace(":06:", ":f0:"))
    line = refused(f"export - --to nccl-topo --bus-ids {ids}", stdin=made)
    assert "gpu0 states 0000:06:00.0 already, and index 0 is 0000:f0:00.0" in line


def test_an_exported_file_is_verified_with_the_load_of_links(
    done: Done, told: Told, plan_file: Path, tmp_path: Path
) -> None:
    """Each of the four tree edges in both directions carries half of the buffer, twice where trees share a wire."""
    file = tmp_path / "file.json"
    out = done(f"export {plan_file} --to mscclpp -o {file}")
    assert "note: keeps 50 GB/s, all of the rate; 2 chunks" in out
    asked = f"verify {file} --machine dgx-1v --gpus 1,4,5,7"
    out = done(asked)
    assert out.startswith("valid execution plan of MSCCL++: all_reduce of 4 GPUs, in place: 2 chunks")
    assert "algbw        50 GB/s, from the loads of NVLink links" in out
    found = told(asked)
    assert (found["valid"], found["rate"], found["ranks"]) == (True, 50.0, 4)


def test_wrong_files_exit_1_and_unreadable_ones_2(done: Done, refused: Done, plan_file: Path) -> None:
    text = done(f"export {plan_file} --to mscclpp")
    line = done("verify -", status=1, stdin=text.replace('"name": "rres"', '"name": "rre"', 1))
    assert line.startswith("topoplan verify: wrong execution plan of MSCCL++: gpu")
    for damaged in (text[: len(text) // 2], text.replace('"ops"', '"opps"', 1)):
        refused("verify -", stdin=damaged)
