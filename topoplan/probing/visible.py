"""What ``CUDA_VISIBLE_DEVICES`` leaves of a machine: the GPUs it names, in its order, up to the first unknown one.

CUDA numbers devices from the fastest down unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; equal GPUs come in the order
of their bus ids, which is the driver's. UUIDs, also shortened ones and those of MIG instances, mean one GPU anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from topoplan.errors import ProbeError
from topoplan.topology import Device, Topology


def visible(topology: Topology, environment: Mapping[str, str]) -> Topology:
    """The machine with the GPUs that CUDA would show a process of this environment.

    Raises
    ------
    ProbeError
        None is left.

    Examples
    --------
    >>> import topoplan
    >>> visible(topoplan.load("dgx-1v"), {"CUDA_VISIBLE_DEVICES": "5,4"}).gpus
    ('gpu5', 'gpu4')
    """
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return topology
    gpus = [topology.device(name) for name in topology.gpus]
    chosen: list[Device] = []
    for word in named.split(","):
        gpu = _meant(word.strip(), gpus)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    if not chosen:
        raise ProbeError(
            f"CUDA_VISIBLE_DEVICES={named[:60]!r} leaves none of the {len(gpus)} GPUs; unset it to see all"
        )
    notes = [f"CUDA_VISIBLE_DEVICES={named} shows {len(chosen)} of {len(gpus)} GPUs"]
    by_number = any(re.fullmatch(r"\d+", word.strip()) for word in named.split(","))
    if (
        by_number
        and len({gpu.model for gpu in gpus}) > 1
        and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        notes.append(
            "warning: GPUs differ, and CUDA counts the fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    names = {gpu.name for gpu in chosen}
    gone = {gpu.name for gpu in gpus} - names
    return replace(
        topology,
        devices=(*chosen, *(device for device in topology.devices if device.kind != "gpu")),
        links=tuple(link for link in topology.links if not {link.src, link.dst} & gone),
        notes=(*topology.notes, *notes),
    )


def _meant(word: str, gpus: list[Device]) -> Device | None:
    if re.fullmatch(r"\d{1,6}", word):
        return gpus[int(word)] if int(word) < len(gpus) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    # Older drivers name an instance MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>.
    whole = word.removeprefix("MIG-").split("/")[0] if word.startswith("MIG-GPU-") else word
    found = [
        gpu
        for gpu in gpus
        if gpu.fact("uuid").startswith(whole)
        or any(one.startswith(word) for one in gpu.fact("mig").split(","))
    ]
    return found[0] if len(found) == 1 else None
