"""Three phases over servers: reduce inside each, reduce and broadcast between local roots, broadcast inside.

Blink 3.4. Each part of the buffer has one local root in every server, which collects it over a tree of the server; the
local roots exchange it in one hop with one of them, and hand the result down the tree. Trees, local roots and shares
come out of one program (`topoplan.packing.hierarchical`), so that the composition is the best of its kind on servers of
any size and wiring. As one shard is one tree up and one down, its phases are its edges inside and between servers, and
run pipelined chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.packing.planner import plan
from topoplan.packing.three_phase import THREE_PHASE
from topoplan.plans.plan import Plan
from topoplan.topology import TopologyLike


def three_phase(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The three-phase schedule of a collective on several servers; the same as ``plan(…, method="three-phase")``.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        A cluster: its devices say to which server they belong.
    collective : str
        allreduce; or broadcast, reduce, allgather, reduce_scatter, which are one direction of it. There the root need
        not be a local root: a gateway in its server sends to the centre of the exchange, or is the centre.
    gpus : sequence of int or None
        The allocation; all GPUs for None. One server may have more of them than another.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        All GPUs are on one server; unknown collective, GPU out of range, a root outside the allocation, or one where
        the collective has none.
    InfeasibleError
        The GPUs of a server are not connected inside it, or the servers not in one hop.

    References
    ----------
    Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020, section 3.4.

    Examples
    --------
    Blink's two DGX-1V with 3 and 5 GPUs, one NIC of 40 Gb/s each (figure 19b: 5.0 GB/s):

    >>> import topoplan
    >>> dgx = topoplan.load("dgx-1v")
    >>> pair = [topoplan.Server(dgx, [0, 1, 2]), topoplan.Server(dgx, [0, 1, 2, 3, 4])]
    >>> made = three_phase(topoplan.cluster(pair, nic_gbps=40, nics=1, nic_access="direct"))
    >>> made.rate, made.bound, made.schedule
    (5.0, 5.0, 'three-phase')
    """
    return plan(topology, collective, gpus=gpus, root=root, method=THREE_PHASE, channels=channels)
