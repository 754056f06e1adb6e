"""The machine library: the generator of every machine, and the files that are written from them.

A test holds that the files in ``topologies/`` equal what is generated. To write them again::

    python -c "from topoplan.machines import write_library; write_library('topologies')"
"""

from __future__ import annotations

import os
from pathlib import Path

from topoplan.machines.amd import mi250, mi250x
from topoplan.machines.nvidia import (
    dgx_1p,
    dgx_1v,
    dgx_2,
    dgx_a100,
    dgx_b200,
    dgx_h100,
    nvlink_x4,
    pcie_x8,
    v100x4,
)

LIBRARY = {
    "dgx-1p": dgx_1p,
    "dgx-1v": dgx_1v,
    "dgx-2": dgx_2,
    "dgx-a100": dgx_a100,
    "dgx-b200": dgx_b200,
    "dgx-h100": dgx_h100,
    "mi250": mi250,
    "mi250x": mi250x,
    "nvlink-x4": nvlink_x4,
    "pcie-x8": pcie_x8,
    "v100x4": v100x4,
}
"""Generator of each machine of the library."""


def write_library(folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write every machine of the library as ``<name>.json`` and return the paths.

    Raises
    ------
    OSError
        The folder does not exist or cannot be written.
    """
    paths = []
    for name, generate in LIBRARY.items():
        path = Path(folder) / f"{name}.json"
        path.write_text(generate().to_json(), encoding="utf-8")
        paths.append(path)
    return tuple(paths)
