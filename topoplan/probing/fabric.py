"""Whether a GPU has joined the NVLink fabric of its switches, as the driver's fabric info says."""

from __future__ import annotations

import ctypes

from topoplan.probing.answers import Answers

_STATES = {1: "registration has not started", 2: "registration is in progress"}


def fabric_state(answers: Answers, handle: object) -> str:
    """What keeps the GPU out of the fabric; empty if it is in, if there is none, or if the driver does not say."""
    for function, structure in (
        ("DeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
        ("DeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        make = getattr(answers.nvml, structure, None)
        if make is None:
            continue
        info = make()
        if answers.ask(function, handle, ctypes.byref(info), kind=object, newer=True) is not None:
            if info.state == answers.nvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status:
                return f"registration failed with status {info.status}"
            return _STATES.get(info.state, "")
    return ""
