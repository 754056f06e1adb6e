"""Find or make the process group of a back end, and wait for gloo's threads before it ends.

A group is an existing one, one made as torchrun asks for, or one of the survivors. A gloo group that has lost a member
cannot be used again: torch cannot take a member out of it (`torch.distributed.shrink_group` is for NCCL alone).
Survivors therefore make a new one, over a store of their own, since that of the job has gone if its host rank died.
torch does not know such a group by name.

Gloo runs collectives in threads of its own (``pt_gloo_runloop``). When one has ended, its thread drops the tensors, for
which it takes Python's lock, and the waiting caller continues meanwhile. On a busy machine that may be too late (torch
2.13, without this package too): the interpreter has ended, and the process aborts with "terminate called without an
active exception"; or the group is being destroyed, which waits for the thread with Python's lock held, for ever. torch
cannot report that its threads are idle, so `wait_for_gloo_threads` reads their state from Linux.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from collectives.peers.address import address_of_interface, resolve_host
from collectives.peers.agreement import Gather
from topoplan.errors import BackendError, UsageError

NAME = "pt_gloo_runloop"

LOOKS = 3
"""Consecutive looks in which none of the threads may have run."""

PAUSE = 7e-3
"""Seconds between two looks, in which they may take Python's lock: a waiting thread requests it every 5 ms."""


def wait_for_gloo_threads(*, limit: float = 10.0) -> bool:
    """Wait until gloo's threads in this process are idle; return whether they were within `limit` seconds.

    Call it between the last collective and the end of a process group or program. A thread that still has tensors to
    drop is ready to run, or wakes up repeatedly for Python's lock; one that does neither in several looks is idle.
    Without gloo's threads, or without Linux, nothing is waited for.
    """
    until = time.monotonic() + limit
    before, quiet = _threads(), 0
    while before and quiet < LOOKS:
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
        now = _threads()
        asleep = all(state == "S" for state, _ in now.values())
        quiet = quiet + 1 if asleep and now == before else 0
        before = now
    return True


def _threads() -> dict[str, tuple[str, str]]:
    """Return gloo's threads by number: the state of each, one letter, and how often it has been scheduled."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() != NAME:
                continue
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it has just ended
        status = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = status.get("voluntary_ctxt_switches", "") + status.get("nonvoluntary_ctxt_switches", "")
        found[task.name] = status["State"].strip()[:1], switches
    return found


atexit.register(wait_for_gloo_threads)


VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets in every process."""


def existing_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group itself, or the default group; raise `UsageError` outside of them."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first, "
            "or start the processes with torchrun"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise UsageError(
            "this process is not in the process group; make the communicator in its members only"
        )
    return found


def group_requested() -> bool:
    """Return whether torchrun, or the like, asks this process to make a group, and none has been made."""
    return not dist.is_initialized() and all(name in os.environ for name in VARIABLES)


def make_group(*, timeout: float) -> None:
    """Initialise torch.distributed from the environment: NCCL with a GPU, else gloo.

    Over NCCL the group has twice the timeout, after which NCCL's watchdog ends the process: this package reports a lost
    peer before that. Raises `UsageError` for a wrong environment, `BackendError` if the processes do not find each
    other.
    """
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        rank, size, _ = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if nccl:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        if not 0 <= rank < size:
            raise ValueError(f"RANK {rank} is not below WORLD_SIZE {size}")
    except ValueError as error:
        raise UsageError(f"{error}; set {', '.join(VARIABLES)} as torchrun does") from error
    limit = WATCHDOG_FACTOR * timeout if nccl else timeout
    try:
        store = _store_of_next_group(rank, size, timedelta(seconds=limit))
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=limit),
        )
    except (RuntimeError, ValueError) as error:
        raise BackendError(
            f"the {size} processes did not find each other at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {limit:g} s "
            f"({' '.join(str(error).split())[:100]}); start all of them, with the same address",
            rank=rank,
        ) from error


def _store_of_next_group(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the part of the job's store for the next group.

    The store outlives a group that is destroyed, and so do the addresses that its ranks have put there. Each rank's
    number of groups lies there too, so it is forgotten with the store.
    """
    made, _, _ = next(iter(rendezvous("env://", rank, size, timeout=timeout)))
    _STORES[:] = [made]
    made.set_timeout(timeout)
    number = made.add(f"topoplan/groups of rank {rank}", 1)
    return dist.PrefixStore(f"topoplan/group {number}", made)


_STORES: list[dist.Store] = []
"""Keeps the server that rank 0 may have in this process for ranks that have yet to join the next group."""


def gloo_over(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of gloo alone, for tensors on the CPU, whose ranks find each other over a store."""
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    if hasattr(dist, "BackendBase"):  # the back end has all of a group's methods by their public names
        return cast("dist.ProcessGroup", gloo)
    return grouped(store, rank, size, cpu=gloo)


def grouped(store: dist.Store, rank: int, size: int, **backends: Any) -> dist.ProcessGroup:
    """Return a group without a name in torch, of a back end for each kind of device; the first is the default."""
    kind = dist.ProcessGroup.BackendType
    kinds = {"cpu": kind.GLOO, "cuda": kind.NCCL}
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kinds[next(iter(backends))])
    for device, backend in backends.items():
        group._register_backend(torch.device(device), kinds[device], backend)
    return group


def gloo_among(gather: Gather, *, rank: int, size: int, local: str, timeout: float) -> dist.ProcessGroup:
    """Return a new gloo group for ranks of a recovery; all of them must call this.

    `gather` is over those ranks. The lowest rank hosts the store at `local`, its machine's address for the others.
    `timeout` is in seconds, for another rank.
    """
    limit = timedelta(seconds=timeout)
    try:
        store = (
            dist.TCPStore(local, 0, is_master=True, wait_for_workers=False, timeout=limit)
            if rank == 0
            else None
        )
        host, port = json.loads(gather("" if store is None else json.dumps([local, store.port]))[0])
        if store is None:
            store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        return gloo_over(store, rank, size, limit)
    except RuntimeError as error:
        raise BackendError(
            f"the {size} surviving ranks do not find each other in a new process group "
            f"({' '.join(str(error).split())[:100]})",
            rank=rank,
        ) from error


def own_address() -> str:
    """Return this machine's address on gloo's interface, or the one by which it reaches the master, or its own name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            return address_of_interface(interface)
        probe.connect((master, 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return resolve_host(socket.gethostname())


def devices_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the library that serves each kind of device in a group: gloo for cpu, nccl for cuda."""
    # a group that wraps others has its own attribute; torch knows only its name
    config = getattr(wrapping(group), "served", None) or dist.get_backend_config(group)
    pairs = (pair.split(":") for pair in config.split(",") if ":" in pair)
    served = {device: library for device, library in pairs if (device, library) in SERVED}
    if not served:
        raise UsageError(f"the process group uses {config}; make one with gloo or nccl")
    return served


def carrier_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of NCCL's messages: a group that wraps others names it."""
    found: dist.ProcessGroup = getattr(wrapping(group), "carrier", group)
    return found


def wrapping(group: Any) -> Any:
    """Return what wraps inner groups in a group: the group itself, or its back end if Python defines that; else group.

    The debug wrapper of torch (TORCH_DISTRIBUTED_DEBUG=DETAIL) is looked through.
    """
    if not hasattr(group, "served"):
        for device in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # no such device, or a torch without such back ends
                found = group.get_backend(torch.device(device))
                found = getattr(found, "wrapped_pg", found)
                if hasattr(found, "served"):
                    return found
    return group


def own_group(group: dist.ProcessGroup, *, timeout: float) -> dist.ProcessGroup | None:
    """Return a new group of the same ranks and libraries over NCCL, or None over gloo; all its ranks must call it.

    The calls on one NCCL communicator must come in the same order on all ranks, which two threads do not keep; gloo
    keeps the messages of several users apart by their tags. Its timeout is twice `timeout`, as in `make_group`.

    A group of all processes is made as torch makes any. For fewer, the others must not be needed, and torch then takes
    the group's name from how many groups a process is in: that must be the same for all ranks of the group.
    """
    served = devices_of(group)
    if "nccl" not in served.values():
        return None
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=timedelta(seconds=WATCHDOG_FACTOR * timeout),
        backend=",".join(f"{device}:{library}" for device, library in served.items()),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    return made


SERVED = (("cpu", "gloo"), ("cuda", "nccl"))
"""Kinds of devices, and the libraries that move their tensors."""

WATCHDOG_FACTOR = 2
"""Our timeout times this is the limit of NCCL's watchdog."""
