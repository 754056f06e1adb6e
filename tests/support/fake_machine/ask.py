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
COMMON_SPEED, LINK_COUNT, LINK_SPEED, LINK_STATE, LINK_VERSION = 90, 91, 164, 165, 166
SPEEDS = (*range(84, 90), *range(132, 138))
C2C_COUNT, C2C_STATUS, C2C_SPEED = 170, 171, 172


def ask(environment: dict[str, str]) -> dict[str, Any]:
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


def field(handle: Any, number: int, scope: int = 0) -> Any:
    """One field value, or the name of the error that stands in for it."""
    values = answer(pynvml.nvmlDeviceGetFieldValues, handle, [(number, scope)])
    if isinstance(values, str):
        return values
    if values[0].nvmlReturn:
        return type(pynvml.NVMLError(values[0].nvmlReturn)).__name__.removeprefix("NVMLError_")
    return values[0].value.uiVal


def affinity(handle: Any) -> Any:
    words = answer(pynvml.nvmlDeviceGetCpuAffinity, handle, 16)
    if isinstance(words, str):
        return words
    return [64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def fabric(handle: Any) -> Any:
    info = pynvml.c_nvmlGpuFabricInfo_v3_t()
    said = answer(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, pynvml.byref(info))
    if said:
        return said
    return [info.state, info.status, info.cliqueId, info.healthMask, info.healthSummary]


def link(handle: Any, number: int) -> dict[str, Any]:
    remote = answer(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, number)
    return {
        "state": answer(pynvml.nvmlDeviceGetNvLinkState, handle, number),
        "version": answer(pynvml.nvmlDeviceGetNvLinkVersion, handle, number),
        "p2p": answer(pynvml.nvmlDeviceGetNvLinkCapability, handle, number, 0),
        "remote": remote if isinstance(remote, str) else remote.busId,
        "type": answer(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, number),
        "speed": field(handle, SPEEDS[number]) if number < len(SPEEDS) else None,
        "scoped": [field(handle, about, number) for about in (LINK_SPEED, LINK_STATE, LINK_VERSION)],
    }


def instances(handle: Any, most: int) -> list[Any]:
    """Name, identity and parent's name of each MIG instance."""
    told = []
    for number in range(most):
        mig = answer(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
        if isinstance(mig, str):
            break
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
        told.append(
            [
                pynvml.nvmlDeviceGetName(mig),
                pynvml.nvmlDeviceGetUUID(mig),
                pynvml.nvmlDeviceGetUUID(parent),
                pynvml.nvmlDeviceIsMigDeviceHandle(mig).value,
            ]
        )
    return told


def gpu(handle: Any, handles: list[Any]) -> dict[str, Any]:
    pci = answer(pynvml.nvmlDeviceGetPciInfo, handle)
    most = answer(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
    return {
        "name": answer(pynvml.nvmlDeviceGetName, handle),
        "uuid": answer(pynvml.nvmlDeviceGetUUID, handle),
        "index": answer(pynvml.nvmlDeviceGetIndex, handle),
        "minor": answer(pynvml.nvmlDeviceGetMinorNumber, handle),
        "busid": pci if isinstance(pci, str) else pci.busId,
        "ids": pci if isinstance(pci, str) else [pci.pciDeviceId, pci.pciSubSystemId],
        "capability": answer(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        "pcie": [
            answer(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            answer(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            answer(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            answer(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        ],
        "pstate": answer(pynvml.nvmlDeviceGetPerformanceState, handle),
        "affinity": affinity(handle),
        "memory_node": answer(pynvml.nvmlDeviceGetNumaNodeId, handle),
        "mig": answer(pynvml.nvmlDeviceGetMigMode, handle),
        "instances": instances(handle, most) if isinstance(most, int) else most,
        "fabric": fabric(handle),
        "links": [link(handle, number) for number in range(LINKS)],
        "link_count": field(handle, LINK_COUNT),
        "common_speed": field(handle, COMMON_SPEED),
        "c2c": answer(lambda: pynvml.nvmlDeviceGetC2cModeInfoV(handle).isC2cEnabled),
        "c2c_count": field(handle, C2C_COUNT),
        "c2c_links": [
            [field(handle, C2C_STATUS, number), field(handle, C2C_SPEED, number)] for number in range(12)
        ],
        "p2p": [
            [answer(pynvml.nvmlDeviceGetP2PStatus, handle, other, index) for index in range(P2P_INDICES)]
            for other in handles
        ],
        "ancestor": [answer(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, other) for other in handles],
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
