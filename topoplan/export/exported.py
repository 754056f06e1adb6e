"""What exporters take and hand back: one server of a machine, choices; a file, and what its reader should know."""

from __future__ import annotations

from dataclasses import dataclass, replace

from topoplan.errors import UsageError
from topoplan.topology import Topology


@dataclass(frozen=True, slots=True)
class Exported:
    """A file for another program, or several.

    Parameters
    ----------
    text : str
        The whole file; empty where there are several.
    notes : tuple of str
        What the format cannot say, what had to be assumed and what to expect, one line each.
    files : tuple of (str, bytes)
        Several files, each with the end of its name, such as ``.0.et``.
    """

    text: str
    notes: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Choices:
    """What may be asked of a file for an engine; None leaves it to the exporter.

    Parameters
    ----------
    size : int or None
        Bytes of the buffer that it is made for.
    max_blocks : int or None
        Most thread blocks of a GPU.
    chunks : int or None
        Chunks that the buffer is cut into.
    chunk : int or None
        Bytes of the longest chunk.
    protocol : str or None
        ``simple`` or ``ll``: whether flags travel beside the data, or with each packet of it.
    runtime : str or None
        Whose limits the file keeps to, where an engine has several runtimes.
    """

    size: int | None = None
    max_blocks: int | None = None
    chunks: int | None = None
    chunk: int | None = None
    protocol: str | None = None
    runtime: str | None = None


DEFAULT = Choices()
"""Nothing asked."""


def one_server(topology: Topology, name: str | None, what: str) -> Topology:
    """The devices of a server and the links between them.

    Parameters
    ----------
    topology : Topology
    name : str or None
        The server; None where there is only one with GPUs.
    what : str
        What describes one server, for the message.

    Raises
    ------
    UsageError
        There is no such server, or there are several and none is named.

    Examples
    --------
    >>> import topoplan
    >>> one_server(topoplan.nvswitch_cluster(2, gpus=4), "s1", "the file").gpus
    ('s1.gpu0', 's1.gpu1', 's1.gpu2', 's1.gpu3')
    """
    servers = topology.servers
    with_gpus = tuple(
        dict.fromkeys(device.server for device in topology.devices if device.kind == "gpu" and device.server)
    )
    if name is None:
        if len(with_gpus) <= 1 and len(servers) <= 1:
            return topology
        if len(with_gpus) != 1:
            raise UsageError(
                f"{what} describes one server, and {topology.name} has {len(with_gpus)}; choose one with --server, for "
                f"example --server {with_gpus[0] if with_gpus else servers[0]}"
            )
        name = with_gpus[0]
    if name not in servers:
        known = ", ".join(servers[:8]) + (" …" if len(servers) > 8 else "") or "none that has a name"
        raise UsageError(f"{topology.name} has no server {name!r}; it has {known}")
    inside = {device.name for device in topology.devices if device.server == name}
    if not any(gpu in inside for gpu in topology.gpus):
        raise UsageError(f"server {name} has no GPU that is used; choose another with --server")
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name in inside),
        links=tuple(link for link in topology.links if link.src in inside and link.dst in inside),
    )
