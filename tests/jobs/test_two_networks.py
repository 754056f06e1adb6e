"""Jobs on what MPI takes for two hosts: network namespaces, joined by a cable, in which its launcher starts ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collectives.communicator.launch import mpiexec_command
from collectives.lab.testbed.sandbox import PRIVATE_RUN, UNSHARE, sandbox_refusal
from tests.faults.recovery import NETWORKS
from tests.support.checkout import ROOT
from topoplan.errors import UsageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(sandbox_refusal()), reason=sandbox_refusal() or "it can be built"),
]

LIMIT = 500  # seconds after which something hangs

BUILD = f"""set -e
{" ".join(PRIVATE_RUN)}
ip link set lo up
ip link add bridge type bridge
ip address add 10.9.9.1/24 dev bridge
ip link set bridge up
for address in {" ".join(NETWORKS)}; do
    ip netns add $address
    ip link add c${{address##*.}} type veth peer name cable netns $address
    ip link set c${{address##*.}} master bridge up
    ip -n $address link set lo up
    ip -n $address address add $address/24 dev cable
    ip -n $address link set cable up
done
"""
"""Two hosts and their switch, without being root."""


def inside(script: str) -> str:
    """What a script prints that runs beside the namespaces."""
    variables = "export PYTHONPATH=$PWD PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", f"{BUILD}\n{variables}\n{script}"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_ranks_of_mpi_on_two_hosts_go_on() -> None:
    """One is killed, two are, one is stopped, another dies while they find each other; each of them twice."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    try:
        mpiexec_command(1)
    except UsageError as error:
        pytest.skip(str(error))
    told = inside(f'{sys.executable} -m tests.faults recovery --backend "mpi networks" --rounds 8')
    assert told.startswith("8 rounds of mpi networks: 8 clean")


ADDRESS = """
import json, os, sys, time
from collectives.peers.address import address_among

folder, rank, round = sys.argv[1], int(sys.argv[2]), 0

def gather(text):
    global round
    round += 1
    written = f"{folder}/{round}."
    with open(f"{written}{rank}.new", "w") as file:
        file.write(text)
    os.rename(f"{written}{rank}.new", f"{written}{rank}")
    while not all(os.path.exists(f"{written}{other}") for other in range(4)):
        time.sleep(0.01)
    return [open(f"{written}{other}").read() for other in range(4)]

print(json.dumps([rank, address_among(gather, rank)]), flush=True)
"""


@pytest.mark.parametrize(
    ("cut", "found"),
    [("", ["10.9.9.2", "10.9.9.2", "10.9.9.3", "10.9.9.3"]), ("ip link set c3 down", ["", "", "", ""])],
    ids=["joined", "cut"],
)
def test_ranks_find_the_addresses_by_which_other_hosts_reach_them(cut: str, found: list[str]) -> None:
    script = f"""folder=$(mktemp -d)
    {cut}
    cat > $folder/address.py <<'END'
{ADDRESS}
END
    for rank in 0 1 2 3; do
        ip netns exec 10.9.9.$((2 + rank / 2)) {sys.executable} $folder/address.py $folder $rank &
    done
    wait"""
    told = sorted(inside(script).splitlines())
    assert told == [f'[{rank}, "{address}"]' for rank, address in enumerate(found)]
