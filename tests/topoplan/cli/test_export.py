"""``export``: what goes to stdout, to stderr and into a file; ``verify`` of the files of engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run
from tests.support.nccl_rules import nccl_channels, nccl_links, read_as_nccl
from topoplan.cli.main import main
from topoplan.engines.registry import FORMATS


@pytest.fixture
def ring_file(tmp_path: Path) -> str:
    path = tmp_path / "ring.json"
    path.write_text(topoplan.ring_plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2, 3]).to_json())
    return str(path)


def test_the_file_goes_to_stdout_and_notes_to_stderr(run: Run) -> None:
    """So that the text can be piped into a file."""
    status, out, err = run("export", "dgx-1v", "--to", "nccl-topo")
    assert status == 0
    assert len(nccl_links(read_as_nccl(out))) == 48 // 3 * 2 + 2 * (8 + 4 + 4) + 2
    assert err.startswith("note: bus ids are invented")
    assert all(line.startswith("note: ") for line in err.splitlines())


def test_a_file_is_written_whole_and_notes_go_to_stdout(run: Run, tmp_path: Path) -> None:
    """The same text as on stdout."""
    path = tmp_path / "graph.xml"
    status, out, err = run("export", "dgx-1v", "--to", "nccl-graph", "--gpus", "1,4,5,7", "-o", str(path))
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == f"written: {path}"
    assert (
        "note: AllReduce: rings 33.3333 GB/s, chains 50 GB/s; trees packed over NVLink, which NCCL cannot run, 50"
        in out
    )
    assert path.read_text() == run("export", "dgx-1v", "--to", "nccl-graph", "--gpus", "7,5,4,1")[1]
    assert nccl_channels(read_as_nccl(path.read_text(), most_nodes=4096), {1, 4, 5, 7})


def test_a_broken_machine_keeps_the_numbers_of_its_gpus(run: Run) -> None:
    """GPU 4 stays dev 4 when GPU 3 dies, and a dead NVLink is not in the file."""
    status, out, _ = run(
        "export", "dgx-1v", "--to", "nccl-topo", "--without-gpu", "3", "--without-link", "gpu0-gpu4"
    )
    assert status == 0
    assert [line.split('"')[1] for line in out.splitlines() if "<gpu " in line] == [
        "0",
        "1",
        "2",
        "4",
        "5",
        "6",
        "7",
    ]
    whole = run("export", "dgx-1v", "--to", "nccl-topo", "--without-gpu", "3")[1]
    assert whole.count("<nvlink") - out.count("<nvlink") == 2


def test_a_plan_file_is_exported_from_stdin_too(run: Run, ring_file: str) -> None:
    """A plan of rings is the ring graph; its machine is the topology file, cut down to its GPUs."""
    text = Path(ring_file).read_text()
    status, out, err = run("export", "-", "--to", "nccl-graph", stdin=text)
    assert status == 0
    assert out == run("export", ring_file, "--to", "nccl-graph")[1]
    assert "rings of the plan:" in err
    assert run("export", ring_file, "--to", "nccl-topo")[1].count("<gpu ") == 4


def test_text_of_nvidia_smi_is_exported(run: Run) -> None:
    """With the speeds that the user gives, which the text leaves open."""
    pair = "     GPU0 GPU1 CPU Affinity\nGPU0  X   NV2  0-15\nGPU1 NV2   X   0-15\n"
    status, out, _ = run("export", "-", "--to", "nccl-topo", "--nvlink-bandwidth", "20GB/s", stdin=pair)
    assert status == 0
    assert out.count('count="2" tclass="0x030200" bandwidth="40.0"') == 2


def test_every_format_is_in_the_help(run: Run) -> None:
    """And what NCCL cannot do."""
    _, out, _ = run("help", "formats")
    words = " ".join(out.replace("-\n", "-").split())
    assert all(name in words for name in FORMATS)
    assert "cannot run packed trees inside a server" in words


def test_a_wrong_plan_is_refused(refused: Callable[..., str], ring_file: str, tmp_path: Path) -> None:
    """Plans are verified first: nobody runs a ring that leaves a GPU out."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text(Path(ring_file).read_text().replace('"share": "', '"share": "1', 1))
    assert "wrong plan" in refused("export", str(wrong), "--to", "nccl-graph")


def test_plans_that_nccl_cannot_run_are_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    """Packed trees, and plans by size."""
    machine = topoplan.load("dgx-2")
    trees, sizes = tmp_path / "trees.json", tmp_path / "sizes.json"
    trees.write_text(topoplan.plan(machine).to_json())
    sizes.write_text(topoplan.plan_by_size(machine, "broadcast").to_json())
    assert "cannot run packed trees" in refused("export", str(trees), "--to", "nccl-graph")
    assert "has 2 plans by size, and nccl-graph holds one" in refused(
        "export", str(sizes), "--to", "nccl-graph"
    )


def test_a_plan_of_several_servers_is_sent_to_their_machine(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    """A plan file takes no --server. Formats that plans alone have hold several servers."""
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan(topoplan.nvswitch_cluster(2, gpus=4), "allgather").to_json())
    for to in (name for name, found in FORMATS.items() if found.of_machine and not found.many_servers):
        assert refused("export", str(path), "--to", to) == (
            f"topoplan export: error: this plan spans 2 servers, and {to} describes one; export the machine with "
            "--server, or a plan for one server\n"
        )


@pytest.mark.parametrize(
    ("to", "options", "told"),
    [
        (
            "nccl-graph",
            [],
            ["export NCCL_GRAPH_FILE=$PWD/below/f", "Search 0 : … channels loaded from XML graph"],
        ),
        (
            "nccl-topo",
            [],
            ["export NCCL_TOPO_FILE=$PWD/below/f", "NCCL_TOPO_FILE set by environment", "topoplan diff"],
        ),
        ("mscclpp", [], ["export MSCCLPP_EXECUTION_PLAN_DIR=$PWD/below,", "libmscclpp_nccl.so"]),
        (
            "msccl-xml",
            [],
            ["export MSCCL_XML_FILES=$PWD/below/f NCCL_ALGO=MSCCL,RING,TREE", "Connected 1 MSCCL"],
        ),
        ("msccl-xml", ["--runtime", "rccl"], ["export MSCCL_ALGO_DIR=$PWD/below RCCL_MSCCL_FORCE_ENABLE=1"]),
        ("dot", [], []),
    ],
)
def test_the_last_notes_say_how_to_have_the_file_used(
    to: str, options: list[str], told: list[str], run: Run, ring_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable, with the place of the file from wherever the command ran, and what the engine prints then; the
    file itself says nothing of it."""
    folder = Path(ring_file).parent
    (folder / "below").mkdir()
    monkeypatch.chdir(folder)
    status, out, _ = run("export", ring_file, "--to", to, *options, "-o", "below/f")
    lines = out.splitlines()
    use = [place for place, line in enumerate(lines) if line.startswith("note: to use it: ")]
    assert (status, len(use)) == (0, 1 if told else 0)
    assert all(any(text in line for line in lines) for text in told)
    assert all(len(line) <= 120 for place in use for line in lines[place:])
    assert "to use it" not in Path("below/f").read_text()


def test_where_nothing_is_written_the_notes_leave_the_place_open(run: Run) -> None:
    """The text goes to stdout, and nobody knows where from there."""
    _, _, err = run("export", "dgx-1v", "--to", "nccl-topo")
    assert "note: to use it: export NCCL_TOPO_FILE=FILE (NCCL 2.6 or later, and RCCL)\n" in err


BUSES = ("06", "07", "0A", "0B", "85", "86", "89", "8A")
LISTED = [f"{number}, 00000000:{bus}:00.0" for number, bus in enumerate(BUSES)]


@pytest.mark.parametrize(
    "text",
    [
        "index, pci.bus_id\n" + "\n".join(LISTED) + "\n",
        "\n".join(LISTED),
        "name, pci.bus_id, index\n" + "\n".join("Tesla, {1}, {0}".format(*one.split(", ")) for one in LISTED),
    ],
    ids=["head", "no head", "other columns"],
)
def test_bus_ids_of_nvidia_smi_go_into_the_topology_file(text: str, run: Run, tmp_path: Path) -> None:
    """As the kernel writes them; the allocation takes those of its GPUs, and nothing is invented for a GPU."""
    path = tmp_path / "ids.csv"
    path.write_text(text)
    status, out, err = run("export", "dgx-1v", "--to", "nccl-topo", "--bus-ids", str(path))
    assert status == 0
    assert [f'<pci busid="0000:{bus}:00.0"' in out for bus in ("06", "0a", "8a")] == [True] * 3
    assert "bus ids are invented" not in err
    _, out, _ = run("export", "dgx-1v", "--gpus", "1,4", "--to", "nccl-topo", "--bus-ids", str(path))
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
def test_a_wrong_list_of_bus_ids_is_one_line(
    text: str, told: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    """What is wrong, and in which line."""
    path = tmp_path / "ids.csv"
    path.write_text(text)
    assert told in refused("export", "dgx-1v", "--to", "nccl-topo", "--bus-ids", str(path))


def test_bus_ids_belong_to_topology_files_of_machines_without_any(
    refused: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    """A graph file has none, and a machine that states its own is not told others."""
    path, made = tmp_path / "ids.csv", tmp_path / "made.xml"
    path.write_text("\n".join(LISTED))
    assert "belongs to --to nccl-topo" in refused(
        "export", "dgx-1v", "--to", "nccl-graph", "--bus-ids", str(path)
    )
    run("export", "dgx-1v", "--to", "nccl-topo", "--bus-ids", str(path), "-o", str(made))
    path.write_text("\n".join(LISTED).replace(":06:", ":f0:"))
    told = refused("export", str(made), "--to", "nccl-topo", "--bus-ids", str(path))
    assert "gpu0 states 0000:06:00.0 already, and index 0 is 0000:f0:00.0" in told


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).to_json(), encoding="utf-8")
    return str(path)


def test_an_exported_file_is_verified_with_the_load_of_links(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the four tree edges in both directions carries half of the buffer, twice where trees share a wire."""
    file = str(tmp_path / "file.json")
    assert main(["export", plan, "--to", "mscclpp", "-o", file]) == 0
    assert "note: keeps 50 GB/s, all of the rate; 2 chunks" in capsys.readouterr().out
    assert main(["verify", file, "--machine", "dgx-1v", "--gpus", "1,4,5,7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid execution plan of MSCCL++: all_reduce of 4 GPUs, in place: 2 chunks")
    assert "algbw        50 GB/s, from the loads of NVLink links" in out
    assert main(["verify", file, "--machine", "dgx-1v", "--gpus", "1,4,5,7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["rate"], found["ranks"]) == (True, 50.0, 4)


def test_wrong_files_exit_1_and_unreadable_ones_2(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line on stderr."""
    file = tmp_path / "file.json"
    assert main(["export", plan, "--to", "mscclpp", "-o", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    capsys.readouterr()
    file.write_text(text.replace('"name": "rres"', '"name": "rre"', 1), encoding="utf-8")
    assert main(["verify", str(file)]) == 1
    assert capsys.readouterr().err.startswith("topoplan verify: wrong execution plan of MSCCL++: gpu")
    for damaged in (text[: len(text) // 2], text.replace('"ops"', '"opps"', 1)):
        file.write_text(damaged, encoding="utf-8")
        assert main(["verify", str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
