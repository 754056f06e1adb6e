"""Names of GPUs in the report around a matrix, and the generation that they mean.

A matrix names no GPU. The reports that people paste do, in lines above or below it: ``collect_env`` of torch and vLLM
and ``nvidia-smi -L`` (``GPU 0: NVIDIA H100 80GB HBM3``), ``check_env`` of sglang (``GPU 0,1,2,3: NVIDIA GB200``), the
table that plain ``nvidia-smi`` prints, the product names of ``nvidia-smi -q``, and ``GPU type:`` of accelerate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.formats.nvidia_smi.nvlink_matching import generation
from topoplan.hosts.link_rates import GpuGeneration
from topoplan.hosts.notes import listed, warning

_LONGEST_LINE = 300
"""Characters of the longest line that may hold a name."""

_LISTED = re.compile(
    r"(?:[^:]{0,60}:)?\s*GPU (\d{1,3}(?:,\s?\d{1,3})*)\s*:\s*([A-Za-z][^:]*?)\s*(?:\(UUID:.*)?", re.IGNORECASE
)
_ROW = re.compile(
    r"\|\s*(\d{1,3})\s+([A-Za-z]\S*(?: \S+)*)\s+(?:(?:On|Off|N/A|WDDM|TCC|MCDM)\s*)?"
    r"\|\s*(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d.*"
)
_PRODUCT_NAME = re.compile(r"\s*Product Name\s*:\s*(\S.*?)\s*")
_ALL_ALIKE = re.compile(r"\s*-?\s*GPU type:\s*(\S.*?)\s*")


def read_gpu_names(text: str) -> tuple[dict[int, str], str]:
    """Read the names of GPUs by number, and a name that holds for all of them.

    Both are empty where the text states none; a GPU that is named twice keeps its first name.

    Examples
    --------
    >>> read_gpu_names("Python: 3.12\\nGPU 0,1: NVIDIA GB200\\nGPU 0,1 Compute Capability: 10.0\\n")
    ({0: 'NVIDIA GB200', 1: 'NVIDIA GB200'}, '')
    >>> read_gpu_names("|   0  Tesla V100-SXM2...  On   | 00000000:06:00.0 Off |    0 |")
    ({0: 'Tesla V100-SXM2...'}, '')
    """
    names: dict[int, str] = {}
    every = ""
    products = 0
    for line in text.splitlines():
        if len(line) > _LONGEST_LINE or line.lstrip().startswith("#"):
            continue
        numbers: tuple[str, ...] = ()
        name = ""
        if "GPU" in line and (found := _LISTED.fullmatch(line)):
            numbers, name = tuple(found[1].split(",")), found[2]
        elif "|" in line and (found := _ROW.fullmatch(line.strip())):
            numbers, name = (found[1],), found[2]
        elif found := _PRODUCT_NAME.fullmatch(line):
            numbers, name = (str(products),), found[1]
            products += 1
        elif found := _ALL_ALIKE.fullmatch(line):
            every = every or found[1]
        for number in numbers:
            names.setdefault(int(number), name.strip())
    return names, every


@dataclass(frozen=True, slots=True)
class NamedGpus:
    """What a report says of the GPUs of a matrix.

    Parameters
    ----------
    models : mapping of str to str
        Name by column; empty where the report names none, or does not say which column a name belongs to.
    generation : GpuGeneration or None
        Of the GPUs; of several the one with the slowest PCIe link. None where it is not known.
    notes : tuple of str
        Names that are not used.
    """

    models: Mapping[str, str]
    generation: GpuGeneration | None = None
    notes: tuple[str, ...] = ()

    def words(self) -> str:
        """The names, each once, for a note."""
        return listed(dict.fromkeys(self.models.values()), noun="names")


def name_gpus(text: str, gpus: Sequence[str], links: Mapping[str, int]) -> NamedGpus:
    """Match the names in a report to the columns of its matrix.

    Parameters
    ----------
    text : str
        The report.
    gpus : sequence of str
        Columns, such as ``GPU0``.
    links : mapping of str to int
        NVLinks that a GPU has at least by the matrix: a name of GPUs that have fewer is of another machine.

    Examples
    --------
    >>> found = name_gpus("GPU 0: NVIDIA H100 80GB HBM3\\nGPU 1: NVIDIA H100 80GB HBM3", ["GPU0", "GPU1"], {})
    >>> found.models["GPU1"], found.generation.name
    ('NVIDIA H100 80GB HBM3', 'H100')
    """
    names, every = read_gpu_names(text)
    kinds = set(names.values()) or ({every} if every else set())
    if not kinds:
        return NamedGpus({})
    if len(kinds) == 1:
        models = dict.fromkeys(gpus, next(iter(kinds)))
    elif all(int(gpu[3:]) in names for gpu in gpus):
        models = {gpu: names[int(gpu[3:])] for gpu in gpus}
    else:
        missing = listed(gpu for gpu in gpus if int(gpu[3:]) not in names)
        return NamedGpus(
            {}, None, (f"the text names {len(names)} GPUs, and not {missing}; names are not used",)
        )
    made = {gpu: generation(model) for gpu, model in models.items()}
    few = [gpu for gpu, one in made.items() if one is not None and 0 < one.links < links.get(gpu, 0)]
    if few:
        model, most = models[few[0]], links[few[0]]
        return NamedGpus(
            {},
            None,
            (
                warning(
                    f"the text names {model}, which has fewer NVLinks than the {most} of {few[0].lower()} in the "
                    "matrix; the name is not used"
                ),
            ),
        )
    known = [one for one in made.values() if one is not None]
    if len(known) < len(made):
        return NamedGpus(models)
    return NamedGpus(models, min(known, key=lambda one: (one.pcie, one.nvlink)))
