"""Facts of a machine that explain why rows of `gpu_report` fail: driver, GPUs, their links, container, libraries.

Nothing here needs more than the driver. A fact that cannot be had is a text that says why.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT

SECONDS = 20.0  # limit of each command

COMMANDS = {
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "topo.txt": ("nvidia-smi", "topo", "-m"),
    "topo-p2p-read.txt": ("nvidia-smi", "topo", "-p2p", "r"),
    "topo-p2p-nvlink.txt": ("nvidia-smi", "topo", "-p2p", "n"),
    "nvlink.txt": ("nvidia-smi", "nvlink", "-s"),
    "probe.json": (sys.executable, "-m", "topoplan", "probe"),
}
"""Files of the row's folder, and what prints them."""

ATTRIBUTES = {
    "compute mode": 20,
    "VMM": 102,
    "file descriptor handles": 103,
    "fabric handles": 128,
    "multicast": 132,
    "MPS": 133,
    "host native atomics": 86,
}
"""CUDA's numbers of a device's attributes."""

PEER = {"performance rank": 1, "access": 2, "native atomics": 3}
"""CUDA's numbers of what the driver tells of two devices."""

LOADERS = {
    "torch": "import torch; torch.cuda.nccl.version()",
    "CuPy": "import cupy.cuda.nccl as nccl; nccl.get_version()",
    "nccl4py": "import nccl.core; nccl.core.get_version()",
}
"""What makes each package load its libnccl."""

LOADED = (
    "\nfound = {line.split()[-1] for line in open('/proc/self/maps') if 'libnccl' in line}"
    "\nprint(' '.join(sorted(found)) or 'no libnccl is loaded')"
)

PREFIXES = ("CUDA_", "NCCL_", "NVIDIA_", "LD_LIBRARY_PATH", "LD_PRELOAD", "TORCH_NCCL_")

CGROUP = ("memory.max", "memory.high", "cpu.max", "pids.max", "cpuset.cpus.effective")


def facts(folder: Path | None) -> dict[str, Any]:
    """Return all facts by name; the output of commands goes into files of a folder, if one is given."""
    found: dict[str, Any] = {"kernel": platform.release(), "processors": os.cpu_count()}
    parts: dict[str, Callable[[], Any]] = {
        "attributes": attributes,
        "peers": peers,
        "shm": shared_memory,
        "cgroup": limits,
        "environment": environment,
        "packages": packages,
        "libnccl": loaded_libraries,
    }
    for name, part in parts.items():
        try:
            found[name] = part()
        except Exception as error:  # a fact of its own
            found[name] = f"{type(error).__name__}: {error}"
    if folder is not None:
        for file, command in COMMANDS.items():
            (folder / file).write_text(printed(command), encoding="utf-8")
        (folder / "facts.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def printed(command: Sequence[str]) -> str:
    """Return what a command prints, or why it does not run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}\n"
    return done.stdout + done.stderr


def attributes() -> list[dict[str, int]]:
    """Return the attributes of each GPU; -1 for one that the driver does not know."""
    cuda, count = _driver()
    return [
        {name: _asked(cuda.cuDeviceGetAttribute, number, gpu) for name, number in ATTRIBUTES.items()}
        for gpu in range(count)
    ]


def peers() -> dict[str, list[list[int]]]:
    """Return for each fact of two GPUs its matrix; -1 for one that the driver does not know."""
    cuda, count = _driver()
    return {
        name: [
            [
                0 if one == other else _asked(cuda.cuDeviceGetP2PAttribute, number, one, other)
                for other in range(count)
            ]
            for one in range(count)
        ]
        for name, number in PEER.items()
    }


def _driver() -> tuple[ctypes.CDLL, int]:
    cuda = ctypes.CDLL("libcuda.so.1")
    status = cuda.cuInit(0)
    count = ctypes.c_int()
    if status or cuda.cuDeviceGetCount(ctypes.byref(count)):
        raise OSError(f"the driver shows no GPU: status {status}")
    return cuda, count.value


def _asked(call: Any, number: int, *devices: int) -> int:
    """Return an attribute; the ordinal of a GPU is its handle in CUDA's driver."""
    value = ctypes.c_int()
    return -1 if call(ctypes.byref(value), number, *devices) else value.value


def shared_memory() -> dict[str, int]:
    """Return the bytes of ``/dev/shm``, of which NCCL needs some for each rank, and those that are free."""
    status = os.statvfs("/dev/shm")
    return {"size": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}


def limits() -> dict[str, str]:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    inside = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    places = [Path("/sys/fs/cgroup") / inside, Path("/sys/fs/cgroup")]
    found = {}
    for name in CGROUP:
        file = next((place / name for place in places if (place / name).is_file()), None)
        if file is not None:
            found[name] = file.read_text().strip()
    return found


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(PREFIXES)}


def packages() -> dict[str, str]:
    wanted = ("nvidia-", "cupy", "nccl4py", "cuda-", "torch", "triton", "numpy")
    found = {
        str(one.metadata["Name"]): one.version
        for one in metadata.distributions()
        if str(one.metadata["Name"] or "").lower().startswith(wanted)
    }
    return dict(sorted(found.items()))


def loaded_libraries() -> dict[str, str]:
    """Return the libnccl that each package loads when it is alone in a process."""
    found = {}
    for name, code in LOADERS.items():
        lines = printed([sys.executable, "-c", code + LOADED]).strip().splitlines()
        found[name] = lines[-1] if lines else "nothing was printed"
    return found
