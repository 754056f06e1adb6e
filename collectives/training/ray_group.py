"""The collective groups of Ray on packed trees: a back end of ``ray.util.collective``.

Ray makes a group in each actor, with its size, its rank and its name. Rank 0 opens the rendezvous. A named actor of Ray
tells its address, with the token of the job, to the others. Ray's object store carries `send` and `recv`: they join two
ranks, and a plan joins all.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, cast

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.communicator import Communicator
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plans

OPERATIONS = {"SUM": "sum", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
"""Our operations by the names of Ray's."""

POLL_SECONDS = 0.02
"""Seconds between two questions for a message or address that is not there yet."""


def register(
    plan: Plans | Topology | str,
    *,
    name: str = "topoplan",
    backend: str = "auto",
    timeout: float = 30.0,
) -> None:
    """Register the back end with Ray; call it on the driver and in every actor, before a group is made.

    Parameters
    ----------
    plan : Plans, Topology or str
        As of `Communicator`: a plan or its file, or the machine whose GPUs are the ranks.
    name : str
        The back end's name in Ray, whose case Ray ignores.
    backend : str
        ``shared`` for actors on one node, ``tcp`` for several, or ``auto``: shared if all actors are on one node.
    timeout : float
        Seconds that a rank waits for the next step of a collective, and for the other ranks at the start.

    Raises
    ------
    UsageError
        The back end or the timeout is not as stated, or Ray is not installed.
    """
    if backend not in ("auto", "shared", "tcp"):
        raise UsageError(
            f"backend must be auto, shared or tcp, got {backend!r}; for GPUs use Ray's NCCL group"
        )
    if not timeout > 0:
        raise UsageError(f"timeout must be above 0 s, got {timeout}")
    try:
        from ray.util.collective.backend_registry import register_collective_backend
        from ray.util.collective.collective_group.base_collective_group import BaseGroup
    except ImportError as error:
        raise UsageError(f'groups of Ray need Ray ({error}): pip install "topoplan[ray]"') from None
    settings = {"plan": plan, "kind": backend, "timeout": timeout, "given_name": name.upper()}
    register_collective_backend(name, type("PlannedGroup", (RayGroup, BaseGroup), settings))


class _Mailbox:
    """An actor of Ray: what the ranks of a group tell each other before it is open, and messages between two ranks."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], Any] = {}

    def put(self, key: tuple[object, ...], value: Any) -> None:
        self.kept[key] = value

    def take(self, key: tuple[object, ...]) -> Any:
        return self.kept.pop(key, None)


_MAILBOXES: dict[str, Any] = {}
"""Mailboxes of the groups of this process, by the group's name."""


class RayGroup:
    """A group of actors; `register` makes a class of it, with a plan and Ray's base class.

    Tensors are numpy arrays, or tensors of torch in the memory of the host, of any shape. Results are in the tensors,
    as Ray's groups have them. `BackendError` is raised on all ranks if one fails, `UsageError` if an argument is wrong.
    """

    plan: Any = None
    kind = "auto"
    timeout = 30.0
    given_name = "TOPOPLAN"
    # of Ray's base class
    world_size: int
    rank: int
    group_name: str

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        import ray

        super().__init__(world_size, rank, group_name)  # type: ignore[call-arg]
        self._ray = ray
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}
        self._rendezvous: Rendezvous | None = None
        # kept after the end of the group: Ray ends the actor with the handle of the rank that made it
        self._mailbox = _MAILBOXES[group_name] = (
            ray.remote(num_cpus=0)(_Mailbox)
            .options(name=f"topoplan group {group_name}", get_if_exists=True)
            .remote()
        )
        try:
            self.communicator = Communicator(self.plan, self._open(), timeout=self.timeout)
        except BaseException:
            self._close_rendezvous()
            raise

    def _open(self) -> Backend[Any]:
        """Return the back end of this rank, once all ranks have told rank 0 their nodes.

        Every message is for one rank, which takes it: a later group of this name finds none of this one.
        """
        size, rank = self.world_size, self.rank
        self._put(("node", rank), self._ray.get_runtime_context().get_node_id())
        if rank == 0:
            token, host = secrets.token_hex(16), self._ray.util.get_node_ip_address()
            self._rendezvous = Rendezvous(f"{host}:0#{token}", size, host=0, job_made=True).start()
            found = {self._take(("node", one), f"rank {one} is not there") for one in range(size)}
            for one in range(size):
                self._put(("place", one), (f"{self._rendezvous.address}#{token}", len(found)))
        address, nodes = self._take(("place", rank), "rank 0 opens no rendezvous")
        if self.kind == "shared" and nodes > 1:
            raise UsageError(f"backend shared needs all actors on one node, got {nodes}; use tcp or auto")
        if self.kind == "tcp" or nodes > 1:
            return TcpBackend(rank, size, rendezvous=address, timeout=self.timeout)
        return SharedBackend.met_at(address, rank, size, timeout=self.timeout)

    def _put(self, key: tuple[object, ...], value: Any) -> None:
        self._ray.get(self._mailbox.put.remote(key, value))

    def _take(self, key: tuple[object, ...], problem: str) -> Any:
        until = time.monotonic() + self.timeout
        while (found := self._ray.get(self._mailbox.take.remote(key))) is None:
            if time.monotonic() > until:
                raise TimeoutError(f"group {self.group_name!r}: {problem} after {self.timeout:g} s")
            time.sleep(POLL_SECONDS)
        return found

    @classmethod
    def backend(cls) -> str:
        return cls.given_name

    @classmethod
    def check_backend_availability(cls) -> bool:
        return cls.plan is not None

    def destroy_group(self) -> None:
        self.communicator.close()
        self._close_rendezvous()

    def _close_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        with self.communicator._refusing():
            array, op = _only(tensor, filled=True), OPERATIONS[allreduce_options.reduceOp.name]
        array[...] = self.communicator.all_reduce(array, op=op)

    def barrier(self, barrier_options: Any = None) -> None:
        self.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        with self.communicator._refusing():
            root, op = reduce_options.root_rank, OPERATIONS[reduce_options.reduceOp.name]
            array = _only(tensor, filled=self.rank == root)
        found = self.communicator.reduce(array, root=root, op=op)
        if self.rank == root:
            array[...] = found

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        with self.communicator._refusing():
            array, root = _only(tensor, filled=True), broadcast_options.root_rank
        array[...] = self.communicator.broadcast(array, root=root)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        with self.communicator._refusing():
            given = _only(tensor)
            outs = _blocks(tensor_list, self.world_size, given, filled=True)
        found = self.communicator.all_gather(given.ravel()).reshape(self.world_size, -1)
        for out, block in zip(outs, found, strict=True):
            out[...] = block.reshape(out.shape)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any
    ) -> None:
        with self.communicator._refusing():
            out = _only(tensor, filled=True)
            given = _blocks(tensor_list, self.world_size, out)
            op = OPERATIONS[reducescatter_options.reduceOp.name]
        whole = np.concatenate([one.ravel() for one in given])
        found = self.communicator.reduce_scatter(whole, op=op)
        out[...] = found.reshape(out.shape)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        peer, array = send_options.dst_rank, _only(tensor)
        number = self._sent[peer] = self._sent.get(peer, 0) + 1
        self._put((self.rank, peer, number), np.ascontiguousarray(array))

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        peer, array = recv_options.src_rank, _only(tensor, filled=True)
        number = self._received[peer] = self._received.get(peer, 0) + 1
        found = self._take((peer, self.rank, number), f"rank {peer} has sent nothing")
        _check_alike(array, found, f"the tensor from rank {peer}")
        array[...] = found.reshape(array.shape)


def _only(tensors: list[Any], *, filled: bool = False) -> np.ndarray[Any, Any]:
    """Return the one tensor of a rank: groups of Ray may have several GPUs in one, these have a rank for each.

    With `filled` a result is written into it.
    """
    if len(tensors) != 1:
        raise UsageError(f"each rank must give 1 tensor, got {len(tensors)}; use one actor for each rank")
    return _array(tensors[0], filled)


def _blocks(
    lists: list[list[Any]], size: int, like: np.ndarray[Any, Any], *, filled: bool = False
) -> list[np.ndarray[Any, Any]]:
    """Return the tensors of a list, one of each rank, all as long as another and of its type."""
    if len(lists) != 1 or len(lists[0]) != size:
        got = len(lists[0]) if len(lists) == 1 else len(lists)
        raise UsageError(f"the list must hold {size} tensors, one of each rank, got {got}")
    found = [_array(one, filled) for one in lists[0]]
    for place, one in enumerate(found):
        _check_alike(one, like, f"tensor {place} of the list")
    return found


def _check_alike(array: np.ndarray[Any, Any], like: np.ndarray[Any, Any], what: str) -> None:
    if array.size != like.size or array.dtype != like.dtype:
        raise UsageError(
            f"{what} must have {like.size} elements of {like.dtype}, got {array.size} of {array.dtype}"
        )


def _array(tensor: Any, filled: bool) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor as a numpy array."""
    found = tensor
    if not isinstance(tensor, np.ndarray):
        try:
            found = np.asarray(tensor.detach().numpy())
        except (AttributeError, TypeError) as error:
            raise UsageError(
                "tensors must be numpy arrays or tensors of torch on the host, of a type that numpy has, got "
                f"{type(tensor)}: {error}"
            ) from None
    if filled and not found.flags.writeable:
        raise UsageError("the tensor must be writable, since the result is written into it; give a copy")
    return cast("np.ndarray[Any, Any]", found)
