"""The density of the first epochs: from a quarter of the entries down to the one that is wanted.

Lin et al., "Deep Gradient Compression", ICLR 2018, section 3.3: 25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %.
"""

from __future__ import annotations

from topoplan.errors import UsageError

FIRST = 0.25
"""Density of the first epoch, and the factor from each to the next."""


def warm_up_density(epoch: int, density: float = 0.001) -> float:
    """The density of an epoch, counted from 0.

    Parameters
    ----------
    epoch : int
    density : float
        What is wanted in the end, above 0 and at most 1.

    Raises
    ------
    UsageError
        An argument is out of range.

    Examples
    --------
    >>> [round(warm_up_density(epoch), 4) for epoch in range(6)]
    [0.25, 0.0625, 0.0156, 0.0039, 0.001, 0.001]
    """
    if epoch < 0:
        raise UsageError(f"epoch {epoch} is before the first one; count from 0")
    if not 0 < density <= 1:
        raise UsageError(f"a density of {density} is not above 0 and at most 1; give for example 0.01")
    return max(density, FIRST ** (epoch + 1))
