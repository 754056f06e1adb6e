"""The stand-ins for CuPy and NCCL have only names and signatures that the genuine packages have; no GPU is needed."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import topoplan
from collectives.backends.nccl import device_arenas
from collectives.tables import cupy_arrays
from tests.support import fake_cupy as wires
from tests.support import fake_streams, gpu_facts
from tests.support.checkout import ROOT
from tests.support.fake_gpu import fake_cupy
from tests.support.fake_nccl import CommShrinkFlag, Groups, Result, nccl4py_modules, nccl_faces
from tests.support.fake_streams import Machine

OWN = {
    "ndarray": {"host"},
    "Stream": {"push", "do", "queue", "capture", "entered", "busy_until"},
    "Event": {"unit", "node", "at"},
    "Graph": {"nodes", "captured"},
    "Module": {"code"},
}
"""What the stand-ins have beside, by which they are made; tests of ours use it, the product does not."""

MISSING = """
import json, sys, warnings
warnings.simplefilter("ignore")
from importlib import import_module
for name in json.loads(sys.argv[1]):
    import_module(name)
missing = []
for name in json.load(sys.stdin):
    found = sys.modules[name.split(".")[0]]
    for part in name.split(".")[1:]:
        found = getattr(found, part, missing)
    if found is missing:
        missing.append(name)
print(json.dumps(missing))
"""


SHRINKS_LATE = r"""
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
typedef int ncclResult_t;
typedef struct ncclComm { ncclResult_t state; } *ncclComm_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef void ncclConfig_t;
static struct ncclComm parent, child;
static ncclComm_t *room;
ncclResult_t ncclGetVersion(int *version) { *version = 23003; return 0; }
const char *ncclGetErrorString(ncclResult_t result) { return "an error"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
                                      ncclConfig_t* config) {
    *newcomm = &parent;
    return 0;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) {
    *asyncError = comm->state;
    return 0;
}
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
    printf("revoke %d\n", revokeFlags);
    return fflush(stdout);
}
static void *later(void *nothing) {
    usleep(200000);
    *room = &child;
    parent.state = 0;
    return nothing;
}
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t* newcomm,
                            ncclConfig_t* config, int shrinkFlags) {
    pthread_t thread;
    printf("shrink without %d %d of %d, flags %d\n", excludeRanksList[0], excludeRanksList[1], excludeRanksCount,
           shrinkFlags);
    *newcomm = 0, room = newcomm, comm->state = 7;
    return fflush(stdout) + pthread_create(&thread, 0, later, 0) + 7;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    printf("abort %s\n", comm == &child ? "child" : "parent");
    return fflush(stdout);
}
"""
"""A libnccl with the prototypes of nccl.h and the manners of NCCL: a communicator that is shrunk is there later."""

SHRINKS = """
import time
from collectives.backends.nccl.nccl_library import find_library
library = find_library()
parent = library.connect(3, 0, bytes(128))
assert parent.ready()
parent.revoke()
child, looks = parent.shrink([2, 1]), 0
while not child.ready():
    looks += 1
    time.sleep(0.01)
print(looks > 2, child.handle.handle not in (0, parent.handle.handle), flush=True)
parent.abort()
child.abort()
"""


OLD_WINDOWS = r"""
#include <stdbool.h>
#include <stddef.h>
typedef int ncclResult_t;
typedef struct ncclComm { ncclResult_t state; } *ncclComm_t;
typedef void *ncclWindow_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef void ncclConfig_t;
typedef struct { int nRanks, rank, stride; } ncclTeam_t;
typedef struct { size_t size; unsigned int magic, version; } ncclCommProperties_t;
static struct ncclComm comm;
static char memory[4096];
ncclResult_t ncclGetVersion(int *version) { *version = RELEASE; return 0; }
const char *ncclGetErrorString(ncclResult_t result) { return "an error"; }
const char *ncclGetLastError(ncclComm_t comm) { return ""; }
ncclResult_t ncclCommInitRankScalable(ncclComm_t* newcomm, int nranks, int myrank, int nId, ncclUniqueId* commIds,
                                      ncclConfig_t* config) {
    *newcomm = &comm;
    return 0;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError) { *asyncError = comm->state; return 0; }
ncclResult_t ncclCommQueryProperties(ncclComm_t comm, ncclCommProperties_t* props) {
    return props->version > RELEASE ? 5 : 0;
}
ncclTeam_t ncclTeamLsa(ncclComm_t comm) { ncclTeam_t team = {4, 1, 1}; return team; }
ncclResult_t ncclMemAlloc(void** ptr, size_t size) { *ptr = memory; return 0; }
ncclResult_t ncclMemFree(void *ptr) { return ptr != memory; }
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int winFlags) {
    *win = size > 512 ? buff : 0;
    return 0;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) { return win != memory; }
ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** outPtr) {
    *outPtr = peer < 4 ? (char *)window + 8 * peer : 0;
    return 0;
}
ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void** outPtr) {
    *outPtr = 0;
    return 0;
}
"""
"""A libnccl with the prototypes of its headers: four of eight ranks reach each other, windows of over 512 bytes are
made, there is no multicast, and properties are refused to newer bindings."""

WINDOWS = """
import sys
from importlib import import_module
from collectives.backends.nccl.nccl_library import describe_library, find_library
library = find_library()
link = library.connect(8, 1, bytes(128))
bindings = import_module("nccl.bindings.nccl")
try:
    bindings.comm_query_properties(link.handle)
    print("properties are told")
except bindings.NCCLError as error:
    print("InvalidUsage" in str(error))
memory = library.allocate(1024)
window, none = link.register(memory, 1024), link.register(memory, 512)
print(link.team(), window.made(), none.made(), window.multicast())
print([window.address(peer) - memory if window.address(peer) else 0 for peer in (0, 3, 4)])
window.close()
library.free(memory)
print(describe_library(library).rpartition(",")[0])
"""


def missing(names: list[str], *modules: str) -> list[str]:
    """Which of some names the genuine packages lack in a process that has imported just these modules."""
    command = [sys.executable, "-c", MISSING, json.dumps(modules)]
    done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def public(module: ModuleType) -> list[str]:
    """The names of a module and of its parts and classes, without those that are the stand-in's own."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        found.append(f"{module.__name__}.{name}")
        if isinstance(value, ModuleType):
            found += public(value)
        elif isinstance(value, type) and not issubclass(value, BaseException):
            own = OWN.get(name, set())
            found += [
                f"{module.__name__}.{name}.{word}"
                for word in vars(value)
                if word[0] != "_" and word not in own
            ]
    return found


@pytest.fixture(scope="module")
def cupy() -> None:
    pytest.importorskip("cupy", reason="compared with the genuine CuPy: pip install cupy-cuda12x")


@pytest.mark.parametrize("which", ["fake_gpu", pytest.param("fake_cupy", marks=pytest.mark.thorough)])
def test_the_fake_cupy_has_no_name_that_cupy_lacks_when_it_has_just_been_imported(
    cupy: None, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "fake_gpu":
        made: Any = fake_cupy(Machine())
    else:
        made = wires.install(monkeypatch, wires.Machine(topoplan.load("dgx-1v"), [], []))
    monkeypatch.undo()
    names = public(made)
    assert len(names) > 15
    assert missing(names, "cupy") == []


def test_cupy_has_every_name_of_it_that_the_product_uses(cupy: None) -> None:
    names = set()
    for path in (Path(topoplan.__file__).parents[1] / "collectives").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "cupy" in text:
            names |= {f"cupy.{name}" for name in re.findall(r"\bcupy\.((?:cuda\.)?(?:runtime\.)?\w+)", text)}
            names |= {f"cupy.cuda.runtime.{name}" for name in re.findall(r"\bruntime\.(\w+)\(", text)}
    names = {name for name in names if not name.startswith("cupy.__")}
    assert len(names) > 25
    assert missing(sorted(names), "cupy") == []


def test_the_fake_nccl4py_has_its_names_and_signatures() -> None:
    core: Any = pytest.importorskip(
        "nccl.core", reason="compared with nccl4py: pip install nccl4py cuda-bindings"
    )
    bindings: Any = pytest.importorskip("nccl.bindings.nccl")
    made, below = nccl4py_modules(Machine(), Groups(Machine(), {}), count())
    for name in vars(made):
        assert name.startswith("_") or hasattr(core, name), name
    for name in vars(below):
        assert name.startswith("_") or hasattr(bindings, name), name
    for name, value in vars(made.Communicator).items():
        if isinstance(value, property):
            assert isinstance(getattr(core.Communicator, name), property), name
        elif not name.startswith("__") and name != "_leave":
            mine = list(inspect.signature(getattr(made.Communicator, name)).parameters)
            assert mine == list(inspect.signature(getattr(core.Communicator, name)).parameters), name
    for name, mine in vars(below).items():
        if isinstance(mine, type) or not callable(mine):
            continue
        told = re.search(r"\((.*)\)", getattr(bindings, name).__doc__)
        assert told is not None
        words = [word.split()[-1] for word in told[1].split(", ")]
        assert words == list(inspect.signature(mine).parameters)
    assert int(core.WindowFlag.DEFAULT) == made.WindowFlag.DEFAULT
    assert not bindings.Window().handle
    for state in below.Result:
        assert bindings.Result[state.name] == state
    for flag in made.CommShrinkFlag:
        assert core.CommShrinkFlag[flag.name] == flag
    # of a communicator that NCCL makes of another one the handle is read when it is there
    assert core.Communicator().ptr == 0
    assert inspect.signature(core.Communicator.revoke).parameters["flags"].default == 0
    assert core.NCCLConfig(blocking=False).blocking is False
    assert int(core.UINT8) == made.UINT8
    assert bytes(core.UniqueId.from_bytes(bytes(range(128)))) == bytes(range(128))
    assert bindings.Comm(0).handle == 0
    bindings.check_status(bindings.Result.InProgress)  # no error: the communicator is not ready yet


def printed(folder: Path, library: str, script: str, *flags: str) -> list[str]:
    """Return the lines that a script prints with the genuine bindings and a libnccl of this source."""
    pytest.importorskip("nccl.core", reason="compared with nccl4py: pip install nccl4py cuda-bindings")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a library in C is compared with nccl4py: install cc")
    (folder / "nccl.c").write_text(library)
    command = [compiler, "-shared", "-fPIC", *flags, "-o", "libnccl.so.2", "nccl.c", "-lpthread"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.thorough
def test_nccl4py_shrinks_as_the_product_expects(tmp_path: Path) -> None:
    """Results of a communicator's calls are found at NCCL's addresses, once NCCL has written them."""
    lines = printed(tmp_path, SHRINKS_LATE, SHRINKS)
    assert lines == [
        "revoke 0",
        "shrink without 1 2 of 2, flags 1",
        "True True",
        "abort parent",
        "abort child",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("release", "told"), [(22907, "True"), (23203, "properties are told")])
def test_nccl4py_makes_windows_with_an_older_libnccl(tmp_path: Path, release: int, told: str) -> None:
    version = f"2.{release // 100 % 100}.{release % 100} by nccl4py for 2.32.3"
    lines = printed(tmp_path, OLD_WINDOWS, WINDOWS, f"-DRELEASE={release}")
    assert lines == [told, "4 True False 0", "[0, 24, 0]", version]


def test_the_library_with_windows_has_the_prototypes_that_the_bindings_call() -> None:
    found = find_spec("nccl.bindings") if find_spec("nccl") else None
    if found is None or not found.submodule_search_locations:
        pytest.skip("compared with nccl4py: pip install nccl4py cuda-bindings")
    text = (Path(found.submodule_search_locations[0]) / "cynccl.pxd").read_text(encoding="utf-8")
    declared = "".join(text.replace("const char*", "constchar*").split())
    prototypes = re.findall(
        r"^(?:ncclResult_t|ncclTeam_t|const char \*)\s*ncc.*?\)", OLD_WINDOWS, re.MULTILINE | re.DOTALL
    )
    assert len(prototypes) == 13
    for prototype in prototypes:
        assert "cdef" + "".join(prototype.split()) in declared, prototype


def test_the_library_in_c_has_the_prototypes_and_flags_of_ncclh() -> None:
    header = find_spec("nvidia.nccl")
    if header is None or not header.submodule_search_locations:
        pytest.skip("compared with nccl.h: pip install nvidia-nccl-cu12")
    text = (Path(header.submodule_search_locations[0]) / "include" / "nccl.h").read_text(encoding="utf-8")
    prototypes = re.findall(r"^(?:ncclResult_t|const char) .*?\)", SHRINKS_LATE, re.MULTILINE | re.DOTALL)
    assert len(prototypes) == 8
    for prototype in prototypes:
        assert "".join(prototype.split()) in "".join(text.split()), prototype
    for flag in CommShrinkFlag:
        assert re.search(rf"#define NCCL_SHRINK_{flag.name} 0x{flag.value:02x}\b", text)
    assert "#define NCCL_REVOKE_DEFAULT 0x00" in text
    for state in Result:
        number = re.search(rf"\bnccl{state.name}\s*=\s*(\d)", text)
        assert number is not None
        assert int(number[1]) == state


def test_the_fakes_stand_where_the_genuine_modules_are() -> None:
    assert sorted(nccl_faces(Machine(), {})) == ["nccl.bindings.nccl", "nccl.core"]


@pytest.mark.thorough
def test_with_the_genuine_packages_and_no_gpu_a_bench_over_nccl_gets_as_far_as_the_driver(
    cupy: None, tmp_path: Path
) -> None:
    shown = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    if subprocess.run([sys.executable, "-c", shown], capture_output=True, timeout=60).returncode == 0:
        pytest.skip("there is a GPU")
    plan = tmp_path / "plan.json"
    plan.write_text(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7]).to_json())
    command = [sys.executable, "-m", "topoplan", "bench", str(plan), "--backend", "nccl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "finds no GPU: cudaErrorInsufficientDriver" in done.stderr
    assert "use a machine with a GPU and its driver" in done.stderr


def test_numbers_of_cuda_are_those_of_the_genuine_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    names = {
        "compute mode": "COMPUTE_MODE",
        "VMM": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        "file descriptor handles": "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        "fabric handles": "HANDLE_TYPE_FABRIC_SUPPORTED",
        "multicast": "MULTICAST_SUPPORTED",
        "MPS": "MPS_ENABLED",
        "host native atomics": "HOST_NATIVE_ATOMIC_SUPPORTED",
    }
    genuine = {
        name: int(getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{text}"))
        for name, text in names.items()
    }
    assert genuine == gpu_facts.ATTRIBUTES
    assert genuine["MPS"] == device_arenas.MPS_ENABLED
    modes = driver.CUstreamCaptureMode
    assert int(modes.CU_STREAM_CAPTURE_MODE_RELAXED) == cupy_arrays.RELAXED == fake_streams.RELAXED
    assert int(modes.CU_STREAM_CAPTURE_MODE_GLOBAL) == fake_streams.GLOBAL
    assert int(driver.CUresult.CUDA_ERROR_NOT_READY) == cupy_arrays.NOT_READY
    assert {name for name in vars(fake_streams.Driver) if name.startswith("cu")} <= {*dir(driver)}
    peer = {
        "performance rank": "PERFORMANCE_RANK",
        "access": "ACCESS_SUPPORTED",
        "native atomics": "NATIVE_ATOMIC_SUPPORTED",
    }
    prefix = "CU_DEVICE_P2P_ATTRIBUTE_"
    assert {
        name: int(getattr(driver.CUdevice_P2PAttribute, prefix + text)) for name, text in peer.items()
    } == gpu_facts.PEER
