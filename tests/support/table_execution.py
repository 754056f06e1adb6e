"""Run the rows of a transfer table one after another: the oracle of back ends and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.transfer_table import TransferTable


def execute(
    table: TransferTable,
    inputs: Sequence[NDArray[Any]],
    buffers: Sequence[NDArray[Any]],
    *,
    combine: np.ufunc = np.add,
) -> None:
    """Run the rows of a table one after another.

    `inputs` are the arrays of each rank, (count,), only read. Rows write to `buffers`, (count,) of each rank, whose
    other elements (`TransferTable.kept`) stay unchanged; they may be `inputs`. `combine` joins a rank's value with an
    arriving one.
    """
    rows = zip(
        table.source.tolist(),
        table.destination.tolist(),
        table.start.tolist(),
        table.stop.tolist(),
        table.add.tolist(),
        table.source_fresh.tolist(),
        table.destination_fresh.tolist(),
        strict=True,
    )
    with np.errstate(all="ignore"):
        for source, destination, start, stop, add, source_fresh, destination_fresh in rows:
            arriving = (inputs if source_fresh else buffers)[source][start:stop]
            target = buffers[destination][start:stop]
            if add:
                own = inputs[destination][start:stop] if destination_fresh else target
                combine(own, arriving, out=target)
            else:
                target[...] = arriving
