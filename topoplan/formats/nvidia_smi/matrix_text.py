"""The table that ``nvidia-smi topo -m`` prints, read into checked cells; nothing is inferred here.

Accepted: tabs or spaces, colour and underline escapes, header names that run together, lines that begin with
#, text before and after the table, cut rows, tables with and without affinity columns, old codes (SOC is SYS,
PSB is PIX). Each stated pair of devices has one code; where both rows are there they must agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from topoplan.errors import TopologyError
from topoplan.formats.nvidia_smi.pcie_tree import CODES

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\[(?:\d{1,2}(?:;\d{1,2})*)?m")
_GPU = re.compile(r"GPU\d+")
_RUN_TOGETHER = re.compile(r"GPU\d+|(?:(?!GPU\d)\S)+")
_CODE = re.compile(r"X|NV[1-9]\d?|" + "|".join(CODES))
_OLD = {"SOC": "SYS", "PSB": "PIX"}
_AFTER_DEVICES = ("CPU", "NUMA", "GPU")
_AFFINITY_COLUMN = re.compile("CPU Affinity|NUMA Affinity|GPU NUMA ID")
_NIC_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)\s*")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Cells of one table.

    Parameters
    ----------
    gpus, nics : tuple of str
        Column names as printed, in printed order.
    codes : dict of (str, str) to str
        X-free code of each stated pair, under both orders: ``NV2``, or one of `pcie_tree.CODES`.
    affinity : dict of str to str
        CPU affinity of the GPUs that state it.
    numa : dict of str to str
        NUMA affinity of the GPUs that state it, such as ``0`` or ``0-1``.
    cut : tuple of str
        GPUs without a row of their own.
    hardware : dict of str to str
        Adapter that a NIC column stands for, from the NIC legend.
    """

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    codes: dict[tuple[str, str], str]
    affinity: dict[str, str]
    numa: dict[str, str]
    cut: tuple[str, ...]
    hardware: dict[str, str]

    def nvlinks(self, first: str, second: str) -> int:
        """NVLinks that the cell of a pair states; 0 for any other code, and where no row states it."""
        code = self.codes.get((first, second), "")
        return int(code[2:]) if code.startswith("NV") else 0


def read_matrix(text: str) -> Matrix:
    """Read and check the table.

    Raises
    ------
    TopologyError
        No header or no GPU row, a repeated name, a row of another length than the header, an unknown code,
        or two rows that disagree; the message names row, column and value.

    Examples
    --------
    >>> matrix = read_matrix("     GPU0 GPU1 CPU Affinity\\nGPU0  X   NV2  0-15\\nGPU1 NV2   X   0-15")
    >>> matrix.nvlinks("GPU1", "GPU0"), matrix.affinity["GPU0"]
    (2, '0-15')
    """
    lines = [_ESCAPE.sub("", line) for line in text.lstrip("\ufeff").splitlines()]
    lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    start, columns, affinities = _header(lines)
    rows: dict[str, list[str]] = {}
    affinity: dict[str, str] = {}
    numa: dict[str, str] = {}
    hardware: dict[str, str] = {}
    legend = False
    for line in lines[start + 1 :]:
        if "egend" in line.split(":")[0]:
            legend = True
        entry = _NIC_LEGEND.fullmatch(line)
        if entry and entry[1] in columns:
            hardware[entry[1]] = entry[2]
        name, *tokens = line.split()
        if legend or entry or not _is_row(name, tokens, columns):
            continue
        if name in rows:
            raise TopologyError(f"row {name} is there twice; give one matrix")
        rows[name] = _row_codes(name, tokens, columns, affinities=affinities)
        if _GPU.fullmatch(name):
            local = dict(zip(affinities, tokens[len(columns) :], strict=False))
            if re.fullmatch(r"\d[\d,-]*", local.get("CPU Affinity", "")):
                affinity[name] = local["CPU Affinity"]
            if re.fullmatch(r"\d[\d,-]*", local.get("NUMA Affinity", "")):
                numa[name] = local["NUMA Affinity"]
    gpus = tuple(name for name in columns if _GPU.fullmatch(name))
    if not any(name in rows for name in gpus):
        raise TopologyError(
            "the nvidia-smi matrix has no GPU row; give the whole output of nvidia-smi topo -m"
        )
    return Matrix(
        gpus=gpus,
        nics=tuple(name for name in columns if name not in gpus),
        codes=_pairs(rows, columns),
        affinity=affinity,
        numa=numa,
        cut=tuple(name for name in gpus if name not in rows),
        hardware=hardware,
    )


def _header(lines: Sequence[str]) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Line number of the header, device columns, and the affinity columns after them."""
    for number, line in enumerate(lines):
        tokens = [part for token in line.split() for part in _RUN_TOGETHER.findall(token)]
        if not any(_GPU.fullmatch(token) for token in tokens) or any(
            _CODE.fullmatch(token) for token in tokens
        ):
            continue
        end = next((i for i, token in enumerate(tokens) if token in _AFTER_DEVICES), len(tokens))
        columns = tuple(tokens[:end])
        repeated = [name for name in dict.fromkeys(columns) if columns.count(name) > 1]
        if repeated:
            raise TopologyError(f"column {repeated[0]} is there twice in the header; names must be unique")
        if columns:
            return number, columns, tuple(_AFFINITY_COLUMN.findall(" ".join(tokens[end:])))
    if any(re.match(r"\s*Link \d+:", line) for line in lines):
        raise TopologyError(
            "this is a listing of nvidia-smi nvlink, which shows no whole machine; give it to --overlay, and the "
            "machine itself, such as the output of nvidia-smi topo -m, as TOPO"
        )
    raise TopologyError(
        "this is neither topology JSON nor an nvidia-smi matrix (no header line names GPU0, GPU1, ...); "
        "give the whole output of nvidia-smi topo -m"
    )


def _is_row(name: str, tokens: Sequence[str], columns: Sequence[str]) -> bool:
    if name in columns:
        return True
    if tokens and _CODE.fullmatch(_OLD.get(tokens[0], tokens[0])):
        raise TopologyError(f"row {name} has no column of that name; the columns are {', '.join(columns)}")
    return False


def _row_codes(
    name: str, tokens: Sequence[str], columns: Sequence[str], *, affinities: Sequence[str]
) -> list[str]:
    codes = [_OLD.get(token, token) for token in tokens]
    for column, code in zip(columns, codes, strict=False):
        if not _CODE.fullmatch(code):
            raise TopologyError(
                f"row {name}, column {column}: {code!r} is none of X, NV#, {', '.join(CODES)}; "
                "is a cell missing?"
            )
        if (code == "X") != (name == column):
            raise TopologyError(
                f"row {name}, column {column}: {code!r}, but X belongs on the diagonal and only there"
            )
        if code.startswith("NV") and not (_GPU.fullmatch(name) and _GPU.fullmatch(column)):
            raise TopologyError(
                f"row {name}, column {column}: {code!r}, but only GPUs have NVLinks between them"
            )
    if len(codes) < len(columns):
        raise TopologyError(
            f"row {name} has {len(codes)} cells for {len(columns)} columns; give the whole matrix"
        )
    extra = codes[len(columns) :]
    if extra and (not affinities or _CODE.fullmatch(extra[0])):
        raise TopologyError(
            f"row {name}: {extra[0]!r} stands after the last of {len(columns)} columns; give the whole matrix"
        )
    return codes[: len(columns)]


def _pairs(rows: dict[str, list[str]], columns: Sequence[str]) -> dict[tuple[str, str], str]:
    codes: dict[tuple[str, str], str] = {}
    for name, row in rows.items():
        for column, code in zip(columns, row, strict=True):
            stated = codes.get((name, column), code)
            if stated != code:
                raise TopologyError(
                    f"row {name}, column {column}: {code!r}, but row {column}, column {name}: {stated!r}; "
                    "the matrix must be symmetric"
                )
            if name != column:
                codes[name, column] = codes[column, name] = code
    return codes
