"""Which entry arrays suit a back end: those of numpy, of CuPy, or of torch's tensors on a GPU."""

from __future__ import annotations

from collectives.arrays.library import ArrayLibrary
from collectives.sparse.entry_arrays import EntryArrays, Line


def entry_arrays(library: ArrayLibrary[Line], gpu: int | None) -> EntryArrays[Line]:
    """Those that suit a back end's arrays.

    Parameters
    ----------
    library : ArrayLibrary
    gpu : int or None
        On which the arrays are, as `ArrayLibrary.gpu` tells it.

    Examples
    --------
    >>> from collectives.arrays.numpy_arrays import NumpyArrays
    >>> import numpy as np
    >>> arrays = entry_arrays(NumpyArrays(), None)
    >>> total = arrays.zeroed(np.empty(4))
    >>> arrays.add(total, (np.array([1, 3]), np.array([0.5, 2.0])))
    >>> total.tolist(), arrays.nonzero(total)[0].tolist()
    ([0.0, 0.5, 0.0, 2.0], [1, 3])
    """
    if library.name == "CuPy":
        from collectives.sparse.gpu_entry_arrays import GpuEntryArrays

        return GpuEntryArrays(library)
    if gpu is not None:
        from collectives.sparse.torch_entry_arrays import torch_entry_arrays

        return torch_entry_arrays(library, gpu)
    from collectives.sparse.host_entry_arrays import HostEntryArrays

    return HostEntryArrays(library)
