"""Sparse allreduce: bytes that cross NICs against the formula, model times against dense rivals, loads of owners."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import topoplan
from collectives import Communicator
from collectives.sparse.codec import WireFormat
from collectives.sparse.exchanges import part_borders
from collectives.sparse.hashed_owners import owner_map
from collectives.sparse.selection.topk import topk
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plan
from topoplan.plans.shards import shard_bounds
from topoplan.schedules.sparse_plan import sparse_trees
from topoplan.units import entry_share

ELEMENTS = 1_000_000
RESNET_50 = 25_557_032  # parameters of ResNet-50

FORMATS = {
    "float32, int32": None,
    "float32, packed": WireFormat(),
    "float16, packed": WireFormat(values="float16"),
}


def main() -> None:
    count_bytes()
    print()
    model_times()
    print()
    owner_loads()


def machine(servers: int, gbps: float = 25) -> Topology:
    return topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), count=servers)], nic_gbps=gbps, nics=1)


def count_bytes() -> None:
    """Bytes that leave a server in one sparse allreduce, as the back end counts them, and what they should be."""
    print(
        f"# bytes that leave the NIC of a server of 8 GPUs, {ELEMENTS} float32, one sparse allreduce over servers"
    )
    print(
        "# formula: (servers - 1) x the messages of all parts, each with round(density x its elements) entries, of 8"
    )
    print("# bytes each or as the wire format says; least: the bits that random indices need, and the values")
    print("# servers  density  entries           counted    formula  equal      least  of dense")
    for servers in (2, 4, 16):
        topology = machine(servers)
        plan = topoplan.three_phase(topology)
        with Communicator(plan) as comm:
            gradients = _gradients(comm.size)
            home = FabricServers(Fabric(plan.topology, plan.channels)).of_rank
            comm.all_reduce(gradients)
            dense = crossed(comm, home)
            for density in (0.01, 0.001):
                for name, wire in FORMATS.items():
                    before = crossed(comm, home)
                    comm.sparse_all_reduce(
                        gradients, density=density, exchange="servers", wire=wire, key=f"{density} {name}"
                    )
                    counted = crossed(comm, home) - before
                    told = comm.explain(gradients, density=density, exchange="servers", wire=wire).plan
                    assert told is not None
                    formula = (servers - 1) * message_bytes_of(told, density, wire)
                    least = round((servers - 1) * density * ELEMENTS * entry_bits(density, name) / 8)
                    print(
                        f"  {servers:>7}  {density:>7}  {name:<15}  {counted:>8}  {formula:>9}  "
                        f"{'yes' if counted == formula else 'NO':>5}  {least:>9}  {counted / dense:>8.4f}"
                    )


def message_bytes_of(plan: Plan, density: float, wire: WireFormat | None) -> int:
    """Bytes of the messages of all parts, each a multiple of 16."""
    total = 0
    borders = part_borders(plan, shard_bounds((shard.share for shard in plan.shards), ELEMENTS))
    for start, stop in pairwise(borders):
        entries = max(1, round(density * (stop - start)))
        length = entries * 8 if wire is None else wire.encoded_bytes_at_most(entries, stop - start, "float32")
        total += -(-length // 16) * 16
    return total


def entry_bits(density: float, name: str) -> float:
    """Bits of an entry: index and value as they are, or the entropy of a random index of this density and the value."""
    value = 16 if name.startswith("float16") else 32
    if "packed" not in name:
        return value + 32
    absent = 1 - density
    return float(value - np.log2(density) - absent / density * np.log2(absent))


def crossed(comm: Communicator, home: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    return sum(
        nbytes
        for (source, there), nbytes in comm.bytes_sent().items()
        if home[source] == 0 and home[there] != 0
    )


def model_times() -> None:
    """The gradient of ResNet-50 on 16 servers of 8 GPUs at 25 Gb/s."""
    topology = machine(16)
    nbytes = 4 * RESNET_50
    dense = topoplan.plan(topology, "allreduce")
    gather = topoplan.plan(topology, "allgather")
    print(
        f"# model time of an allreduce of {RESNET_50} float32 (ResNet-50), 16 DGX-1V at 25 Gb/s, 8-byte entries"
    )
    print("# schedule                            density        ms   against the two-level dense")
    rows = [
        ("dense ring", None, topoplan.ring_plan(topology), nbytes),
        ("two-level dense (three phases)", None, topoplan.three_phase(topology), nbytes),
    ]
    for density in (0.01, 0.001):
        gathered = 128 * round(density * RESNET_50) * 8
        rows += [
            ("flat top-k, pairs gathered", density, gather, gathered),
            (
                "three phases, sparse between",
                density,
                topoplan.sparse_plan(topology, density=density),
                nbytes,
            ),
            ("dense trees on entries", density, sparse_trees(dense, entries=entry_share(density)), nbytes),
        ]
    seconds = [topoplan.simulate(plan, nbytes=size).seconds for _, _, plan, size in rows]
    for (name, part, _, _), time in zip(rows, seconds, strict=True):
        told = "" if part is None else f"{part:g}"
        print(f"  {name:<34}  {told:>7}  {time * 1e3:>8.2f}   {seconds[1] / time:>6.2f}x")


OWNED = 400_000  # elements of the gradients whose owners are compared


def clustered_gradients(kind: str, ranks: int) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Gradients of `OWNED` elements: uniform, rows of an embedding that a batch used, or one hot layer of ten.

    Embedding: 6250 rows of 64, of which each rank used 100, the first ones most often (Zipf). Hot layer: the third of
    ten layers is ten times the others.
    """
    made = []
    for rank in range(ranks):
        draw = np.random.default_rng([rank, len(kind)])
        gradient = draw.standard_normal(OWNED).astype(np.float32)
        if kind == "embedding rows":
            used = np.unique(draw.zipf(1.2, 4000)) - 1
            rows = gradient.reshape(-1, 64)
            rows[~np.isin(np.arange(len(rows)), used[used < len(rows)][:100])] *= np.float32(0.001)
        elif kind == "one hot layer":
            gradient.reshape(10, -1)[2] *= 10
        made.append(gradient)
    return made


KINDS_OF_GRADIENTS = ("uniform", "embedding rows", "one hot layer")


def fullest_loads(kind: str, ranks: int, density: float) -> tuple[float, float]:
    """Return the entries of the fullest owner over the mean, with owners by ranges and by hash."""
    entries = round(density * OWNED)
    chosen = np.concatenate([topk(one, entries)[0] for one in clustered_gradients(kind, ranks)])
    by_range = chosen.astype(np.int64) * ranks // OWNED
    by_hash = owner_map(OWNED, ranks).owners_of(chosen)
    first, second = (
        float(np.bincount(owners, minlength=ranks).max() / (len(chosen) / ranks))
        for owners in (by_range, by_hash)
    )
    return first, second


def owner_bytes(kind: str, ranks: int, density: float, exchange: str) -> tuple[int, int]:
    """Return the most bytes that a rank sends and receives in one sparse allreduce, as the back end counts them."""
    with Communicator(topoplan.load("dgx-2").subset(list(range(ranks)))) as comm:
        comm.sparse_all_reduce(clustered_gradients(kind, ranks), density=density, exchange=exchange)
        sent, received = [0] * ranks, [0] * ranks
        for (source, target), nbytes in comm.bytes_sent().items():
            sent[source] += nbytes
            received[target] += nbytes
    return max(sent), max(received)


def least_bytes(kind: str, ranks: int, density: float) -> int:
    """Return the bytes that some rank must receive for exact sums: values of 4 bytes of all indices but its own k.

    The indices themselves are not counted.
    """
    entries = round(density * OWNED)
    chosen = [topk(one, entries)[0] for one in clustered_gradients(kind, ranks)]
    return 4 * (len(np.unique(np.concatenate(chosen))) - entries)


def owner_loads() -> None:
    """Owners by ranges and by hash on three kinds of gradients, and the bytes of three exchanges and of exact sums."""
    print(
        f"# one sparse allreduce of {OWNED} float32, entries of 8 bytes; load: entries of the fullest owner over"
    )
    print(
        "# the mean; bytes of the fullest rank in units of k entries of 8 bytes, sent and received; least: what"
    )
    print("# exact sums take without their indices; balanced owners choose k of the sums again")
    print(
        "# kind            ranks  density   ranges   hashed   hashed sent, received   pairs sent, received    least   "
        "balanced sent, received"
    )
    for kind in KINDS_OF_GRADIENTS:
        for ranks in (4, 8, 16):
            for density in (0.01, 0.1):
                by_range, by_hash = fullest_loads(kind, ranks, density)
                unit = 8 * round(density * OWNED)
                hashed, pairs, balanced = (
                    [one / unit for one in owner_bytes(kind, ranks, density, name)]
                    for name in ("hashed", "pairs", "balanced")
                )
                least = least_bytes(kind, ranks, density) / unit
                print(
                    f"  {kind:<14}  {ranks:>5}  {density:>7}  {by_range:>7.2f}  {by_hash:>7.2f}  "
                    f"{hashed[0]:>12.2f}  {hashed[1]:>8.2f}  {pairs[0]:>12.2f}  {pairs[1]:>8.2f}  {least:>8.2f}  "
                    f"{balanced[0]:>12.2f}  {balanced[1]:>8.2f}"
                )


def _gradients(ranks: int) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    return [np.random.default_rng(rank).standard_normal(ELEMENTS).astype(np.float32) for rank in range(ranks)]
