"""All fake machines by name."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.fake_machine.broken import (
    dead_nvlinks,
    driver_not_loaded,
    half_failing,
    lost_gpu,
    no_driver,
    no_gpu,
    old_driver,
    one_mig,
    refused_p2p,
)
from tests.support.fake_machine.description import FakeMachine
from tests.support.fake_machine.dgx1 import dgx1p, dgx1v
from tests.support.fake_machine.dgx2 import dgx2
from tests.support.fake_machine.dgx_a100 import dgx_a100
from tests.support.fake_machine.dgx_h100 import dgx_h100
from tests.support.fake_machine.other_boxes import grace_hopper, hidden_switch, pcie_box

MACHINES: dict[str, Callable[[], FakeMachine]] = {
    machine.__name__: machine
    for machine in (
        dgx1p,
        dgx1v,
        dgx2,
        dgx_a100,
        dgx_h100,
        pcie_box,
        dead_nvlinks,
        refused_p2p,
        half_failing,
        one_mig,
        lost_gpu,
        no_gpu,
        no_driver,
        driver_not_loaded,
        old_driver,
        grace_hopper,
        hidden_switch,
    )
}
