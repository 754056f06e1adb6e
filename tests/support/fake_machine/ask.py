"""A program that asks the genuine nvidia-ml-py everything about this machine and prints the answers as JSON.

An answer that is an error is the name of its class. Run it with a fake machine's environment (`ask`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pynvml

LINKS = 20
P2P_INDICES = 5
OF_A_GPU = (
    "Name UUID Index MinorNumber CudaComputeCapability MaxPcieLinkGeneration MaxPcieLinkWidth CurrPcieLinkGeneration "
    "CurrPcieLinkWidth PerformanceState NumaNodeId MigMode"
)
OF_A_LINK = "State Version RemoteDeviceType"
COMMON_SPEED, LINK_COUNT, LINK_SPEED, LINK_STATE, LINK_VERSION = 90, 91, 164, 165, 166
SPEEDS = (*range(84, 90), *range(132, 138))
C2C_COUNT, C2C_STATUS, C2C_SPEED = 170, 171, 172


def ask(environment: dict[str, str]) -> dict[str, Any]:
    """What a new process with this environment is told."""
    told = subprocess.run(
        [sys.executable, __file__], env=environment, check=True, capture_output=True, text=True
    )
    answers: dict[str, Any] = json.loads(told.stdout)
    return answers


def answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or the name of the error that it raises."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")


def get(what: str, *arguments: Any) -> Any:
    return answer(getattr(pynvml, f"nvmlDeviceGet{what}"), *arguments)


def field(handle: Any, number: int, scope: int = 0) -> Any:
    """One field value, or the name of the error that stands in for it."""
    values = get("FieldValues", handle, [(number, scope)])
    if isinstance(values, str):
        return values
    if values[0].nvmlReturn:
        return type(pynvml.NVMLError(values[0].nvmlReturn)).__name__.removeprefix("NVMLError_")
    return values[0].value.uiVal


def affinity(handle: Any) -> Any:
    """CPUs near a GPU, in order."""
    words = get("CpuAffinity", handle, 16)
    if isinstance(words, str):
        return words
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def fabric(handle: Any) -> Any:
    """State, status, clique and health of the GPU's fabric."""
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    said = get("GpuFabricInfoV", handle, pynvml.byref(info))
    if said:
        return said
    return [info.state, info.status, info.cliqueId, info.healthMask, info.healthSummary]


def link(handle: Any, number: int) -> dict[str, Any]:
    remote = get("NvLinkRemotePciInfo", handle, number)
    return {
        **{what: get(f"NvLink{what}", handle, number) for what in OF_A_LINK.split()},
        "p2p": get("NvLinkCapability", handle, number, 0),
        "remote": remote if isinstance(remote, str) else remote.busId,
        "speed": field(handle, SPEEDS[number]) if number < len(SPEEDS) else None,
        "scoped": [field(handle, about, number) for about in (LINK_SPEED, LINK_STATE, LINK_VERSION)],
    }


def instances(handle: Any) -> Any:
    """Name, identity and parent's name of each MIG instance."""
    most = get("MaxMigDeviceCount", handle)
    if isinstance(most, str):
        return most
    told = []
    for number in range(most):
        mig = get("MigDeviceHandleByIndex", handle, number)
        if isinstance(mig, str):
            break
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        about = [pynvml.nvmlDeviceGetUUID(one) for one in (mig, parent)]
        told.append([pynvml.nvmlDeviceGetName(mig), *about, pynvml.nvmlDeviceIsMigDeviceHandle(mig).value])
    return told


def gpu(handle: Any, handles: list[Any]) -> dict[str, Any]:
    pci = get("PciInfo", handle)
    return {
        **{what: get(what, handle) for what in OF_A_GPU.split()},
        "busid": pci if isinstance(pci, str) else pci.busId,
        "ids": pci if isinstance(pci, str) else [pci.pciDeviceId, pci.pciSubSystemId],
        "affinity": affinity(handle),
        "instances": instances(handle),
        "fabric": fabric(handle),
        "links": [link(handle, number) for number in range(LINKS)],
        "link_count": field(handle, LINK_COUNT),
        "common_speed": field(handle, COMMON_SPEED),
        "c2c": answer(lambda: pynvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled),
        "c2c_count": field(handle, C2C_COUNT),
        "c2c_links": [[field(handle, about, n) for about in (C2C_STATUS, C2C_SPEED)] for n in range(12)],
        "p2p": [
            [get("P2PStatus", handle, other, index) for index in range(P2P_INDICES)] for other in handles
        ],
        "ancestor": [get("TopologyCommonAncestor", handle, other) for other in handles],
    }


def everything() -> dict[str, Any]:
    """The driver and every GPU, or what nvmlInit raises."""
    failure = answer(pynvml.nvmlInit)
    if failure:
        return {"init": failure}
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return {
        "init": "",
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "cuda": pynvml.nvmlSystemGetCudaDriverVersion(),
        "gpus": [gpu(handle, handles) for handle in handles],
    }


if __name__ == "__main__":
    json.dump(everything(), sys.stdout)
