"""The collective groups of Ray on packed trees: a back end of ``ray.util.collective``.

Ray makes a group in each actor, with its size, its rank and its name. Rank 0 opens the rendezvous. A named actor of Ray
tells its address, with the token of the job, to the others. Ray's object store carries `send` and `recv`: they join two
ranks, and a plan joins all.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

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

    def look(self, key: tuple[object, ...]) -> Any:
        return self.kept.get(key)

    def take(self, key: tuple[object, ...]) -> Any:
        return self.kept.pop(key, None)


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
        # of this name at once on all ranks; it ends with the last handle
        self._mailbox = (
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
        """Return the back end of this rank, once all ranks have told their nodes."""
        size, rank = self.world_size, self.rank
        if rank == 0:
            token, host = secrets.token_hex(16), self._ray.util.get_node_ip_address()
            self._rendezvous = Rendezvous(f"{host}:0#{token}", size, host=0, job_made=True).start()
            self._put(("address",), f"{self._rendezvous.address}#{token}")
        self._put(("node", rank), self._ray.get_runtime_context().get_node_id())
        address = self._wait(("address",), "look", "rank 0 opens no rendezvous")
        nodes = {self._wait(("node", one), "look", f"rank {one} is not there") for one in range(size)}
        if self.kind == "shared" and len(nodes) > 1:
            raise UsageError(
                f"backend shared needs all actors on one node, got {len(nodes)}; use tcp or auto"
            )
        if self.kind == "tcp" or len(nodes) > 1:
            return TcpBackend(rank, size, rendezvous=address, timeout=self.timeout)
        return SharedBackend.met_at(address, rank, size, timeout=self.timeout)

    def _put(self, key: tuple[object, ...], value: Any) -> None:
        self._ray.get(self._mailbox.put.remote(key, value))

    def _wait(self, key: tuple[object, ...], how: str, problem: str) -> Any:
        until = time.monotonic() + self.timeout
        while (found := self._ray.get(getattr(self._mailbox, how).remote(key))) is None:
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
        array = _only(tensor)
        _fill(array, self.communicator.all_reduce(array, op=OPERATIONS[allreduce_options.reduceOp.name]))

    def barrier(self, barrier_options: Any = None) -> None:
        self.communicator.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        array, root = _only(tensor), reduce_options.root_rank
        found = self.communicator.reduce(array, root=root, op=OPERATIONS[reduce_options.reduceOp.name])
        if self.rank == root:
            _fill(array, found)

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        array = _only(tensor)
        _fill(array, self.communicator.broadcast(array, root=broadcast_options.root_rank))

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        given, outs = _only(tensor), [_array(one) for one in _blocks(tensor_list, self.world_size)]
        found = self.communicator.all_gather(given.ravel()).reshape(self.world_size, -1)
        for out, block in zip(outs, found, strict=True):
            _fill(out, block)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any
    ) -> None:
        out, given = _only(tensor), [_array(one) for one in _blocks(tensor_list, self.world_size)]
        whole = np.concatenate([one.ravel() for one in given])
        _fill(
            out, self.communicator.reduce_scatter(whole, op=OPERATIONS[reducescatter_options.reduceOp.name])
        )

    def send(self, tensor: list[Any], send_options: Any) -> None:
        peer = send_options.dst_rank
        number = self._sent[peer] = self._sent.get(peer, 0) + 1
        self._put((self.rank, peer, number), np.ascontiguousarray(_only(tensor)))

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        peer = recv_options.src_rank
        number = self._received[peer] = self._received.get(peer, 0) + 1
        _fill(_only(tensor), self._wait((peer, self.rank, number), "take", f"rank {peer} has sent nothing"))


def _only(tensors: list[Any]) -> np.ndarray[Any, Any]:
    """Return the one tensor that a rank gives: Ray's groups may have several GPUs, ours have one rank each."""
    if len(tensors) != 1:
        raise UsageError(f"each rank must give 1 tensor, got {len(tensors)}; use one actor for each rank")
    return _array(tensors[0])


def _blocks(lists: list[list[Any]], size: int) -> list[Any]:
    if len(lists) != 1 or len(lists[0]) != size:
        got = len(lists[0]) if len(lists) == 1 else len(lists)
        raise UsageError(f"the list must hold {size} tensors, one of each rank, got {got}")
    return lists[0]


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    """Return the memory of a tensor as a numpy array."""
    if isinstance(tensor, np.ndarray):
        return tensor
    try:
        found = np.asarray(tensor.detach().numpy())
    except (AttributeError, TypeError) as error:
        raise UsageError(
            "tensors must be numpy arrays or tensors of torch on the host, of a type that numpy has, got "
            f"{type(tensor)}: {error}"
        ) from None
    return found


def _fill(array: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
    if array.size != found.size or array.dtype != found.dtype:
        raise UsageError(
            f"the tensor must have {found.size} elements of {found.dtype}, got {array.size} of {array.dtype}"
        )
    array[...] = found.reshape(array.shape)
