"""What ``CUDA_VISIBLE_DEVICES`` leaves of a machine: the GPUs it names, in its order, up to the first unknown one.

CUDA numbers devices from the fastest down unless ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``; equal GPUs come in the order
of their bus ids, which is the driver's. UUIDs, also shortened ones and those of MIG instances, mean one GPU anywhere.
The first word says whether numbers, GPUs or MIG instances are named; a word of another kind ends the list, and a word
that is there twice empties it. A number ends where its digits do (``torch.cuda`` reads the variable likewise).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

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
    words = _words(named.strip())
    twice = len(set(words)) < len(words)
    chosen: list[Device] = []
    for word in () if twice else words:
        gpu = _meant(word, gpus)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    if not chosen:
        why = ", since it names one twice" if twice else ""
        raise ProbeError(
            f"CUDA_VISIBLE_DEVICES={named[:60]!r} leaves none of the {len(gpus)} GPUs{why}; unset it to see all"
        )
    notes = [f"CUDA_VISIBLE_DEVICES={_printable(named)} shows {len(chosen)} of {len(gpus)} GPUs"]
    if (
        words[0].isdigit()
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


def _words(named: str) -> list[str]:
    """The numbers, or the identities of one kind, with which the variable begins."""
    kind = re.match(r"GPU-|MIG-", named)
    pattern = rf"\s*({kind[0]}\S*)" if kind else r"\s*\+?([0-9]{1,9})"
    found = [re.match(pattern, word) for word in named.split(",")]
    told = takewhile(lambda match: match is not None, found)
    return [match[1] if kind else str(int(match[1])) for match in told if match]


def _printable(named: str) -> str:
    """The beginning of the variable, for a note."""
    text = "".join(letter if letter.isprintable() else "?" for letter in named[:60])
    return text + "…" * (len(named) > 60)


def _meant(word: str, gpus: list[Device]) -> Device | None:
    if word.isdigit():
        return gpus[int(word)] if int(word) < len(gpus) else None
    # Older drivers name an instance MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>.
    whole = word.removeprefix("MIG-").split("/")[0] if word.startswith("MIG-GPU-") else word
    found = [
        gpu
        for gpu in gpus
        if gpu.fact("uuid").startswith(whole)
        or any(one.startswith(word) for one in gpu.fact("mig").split(","))
    ]
    return found[0] if len(found) == 1 else None
