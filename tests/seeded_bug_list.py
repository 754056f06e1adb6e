"""Bugs that tests must catch, at least two for each room: `tests.seeded_bugs` seeds them one at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One bug: the place that it replaces, and the tests that should catch it.

    Parameters
    ----------
    name : str
    idea : str
        The kind of mistake, such as ``off by one``.
    file : str
        Path from the root of the checkout.
    old, new : str
        Code that occurs exactly once in the file, and the code that replaces it.
    tests : tuple of str
        Arguments of pytest.
    """

    name: str
    idea: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = (
    # topoplan: units
    Bug(
        "units-bus-factor",
        "lost factor",
        "topoplan/units.py",
        "return 2 * (ranks - 1) / ranks",
        "return (ranks - 1) / ranks",
        ("topoplan/units.py",),
    ),
    Bug(
        "units-terabits",
        "wrong unit",
        "topoplan/units.py",
        "value *= 1000.0 ** _THOUSANDS",
        "value *= 1024.0 ** _THOUSANDS",
        ("topoplan/units.py", "tests/topoplan/cli/test_output.py"),
    ),
    Bug(
        "units-gpu-range",
        "off by one",
        "topoplan/units.py",
        "numbers.extend(range(first, last + 1))",
        "numbers.extend(range(first, last))",
        ("topoplan/units.py",),
    ),
    # topoplan: machine
    Bug(
        "machine-parallel-links",
        "wrong bound",
        "topoplan/machine/fabric.py",
        "link.bandwidth > widest[ends].bandwidth",
        "link.bandwidth < widest[ends].bandwidth",
        ("tests/topoplan/machine/test_topology.py",),
    ),
    Bug(
        "machine-oversubscription",
        "swapped operands",
        "topoplan/machine/cluster_network.py",
        "for (out, _), number in down.items()) / ratio",
        "for (out, _), number in down.items()) * ratio",
        ("tests/topoplan/machine/test_clusters.py",),
    ),
    Bug(
        "machine-slowest-bridge",
        "wrong bound",
        "topoplan/machine/host_topology.py",
        "bandwidth = min(slowest, device.bandwidth)",
        "bandwidth = max(slowest, device.bandwidth)",
        ("tests/topoplan/machine/test_hosts.py", "tests/topoplan/reading/test_nccl_xml.py"),
    ),
    # topoplan: reading
    Bug(
        "reading-host-digits",
        "wrong name",
        "topoplan/reading/slurm.py",
        "found += [str(number).zfill(len(first))",
        "found += [str(number)",
        ("topoplan/reading/slurm.py", "tests/topoplan/reading/test_slurm.py"),
    ),
    Bug(
        "reading-slowest-generation",
        "wrong bound",
        "topoplan/reading/nvidia_smi_topology.py",
        "min(known, key=lambda one: (one.pcie, one.nvlink))",
        "max(known, key=lambda one: (one.pcie, one.nvlink))",
        ("tests/topoplan/reading/test_nvidia_smi.py",),
    ),
    # topoplan: plans
    Bug(
        "plans-reduce-direction",
        "swapped operands",
        "topoplan/plans/loads.py",
        'devices = edge.route[::-1] if op == "reduce" else edge.route',
        'devices = edge.route[::-1] if op == "broadcast" else edge.route',
        ("topoplan/plans/loads.py", "tests/topoplan/plans/test_verify.py"),
    ),
    Bug(
        "verify-contribution-twice",
        "missing check",
        "topoplan/plans/verify.py",
        "held[edge.parent] = np.minimum(held[edge.parent] + held[edge.child], MANY)",
        "held[edge.parent] = np.maximum(held[edge.parent], held[edge.child])",
        ("topoplan/plans/verify.py", "tests/topoplan/plans/test_verify.py"),
    ),
    Bug(
        "verify-shares-below-one",
        "missing check",
        "topoplan/plans/verify.py",
        "if total != whole:",
        "if total > whole:",
        ("tests/topoplan/plans/test_verify.py::test_changed_shares_are_found",),
    ),
    Bug(
        "verify-claimed-bound",
        "missing check",
        "topoplan/plans/verify.py",
        '_check_claim("bound", plan.bound, bound)',
        '_check_claim("rate", plan.rate, rate)',
        ("tests/topoplan/plans/test_verify.py",),
    ),
    Bug(
        "certificate-partition",
        "off by one",
        "topoplan/plans/certificates/certificate.py",
        "return crossing / (2 * (len(with_rank) - 1))",
        "return crossing / (2 * len(with_rank))",
        ("topoplan/plans/certificates/certificate.py", "tests/topoplan/plans/test_certificate.py"),
    ),
    Bug(
        "certificate-negative-length",
        "missing check",
        "topoplan/plans/certificates/certificate.py",
        "if value < 0:",
        "if value > fabric.size * 10**9:",
        ("tests/topoplan/plans/test_certificate.py",),
    ),
    Bug(
        "certificate-root-outside",
        "missing check",
        "topoplan/plans/certificates/certificate.py",
        'if collective in ("broadcast", "reduce") and root not in side:',
        "if root is not None and root >= fabric.size:",
        ("tests/topoplan/plans/test_certificate.py",),
    ),
    # topoplan: solve
    Bug(
        "solve-flow-residual",
        "lost residual",
        "topoplan/solve/cuts_and_partitions.py",
        "self._residual[arc ^ 1] += pushed",
        "self._residual[arc ^ 1] += 0",
        ("tests/topoplan/solve/test_bounds.py::test_a_flow_equals_its_cut_and_the_flow_of_networkx",),
    ),
    Bug(
        "solve-split-bound",
        "wrong bound",
        "topoplan/solve/upper_bound.py",
        "rate=sum(one.rate for one in alone)",
        "rate=max(one.rate for one in alone)",
        (
            "tests/topoplan/solve/test_bounds.py::test_bounds_of_channels_that_a_buffer_is_divided_between_add_up",
        ),
    ),
    Bug(
        "solve-mwu-rate",
        "wrong bound",
        "topoplan/solve/packing/multiplicative_weights.py",
        "(load / self.capacity).max()",
        "(load / self.capacity).mean()",
        ("tests/topoplan/solve/test_mwu.py",),
    ),
    Bug(
        "solve-orbit-widths",
        "lost factor",
        "topoplan/solve/packing/packing_program.py",
        "limits[row] = c // common * self.widths[row]",
        "limits[row] = c // common",
        ("topoplan/solve/packing/packing_program.py", "tests/topoplan/solve/test_exact.py"),
    ),
    # topoplan: schedules
    Bug(
        "schedules-second-tree",
        "off by one",
        "topoplan/schedules/binary_trees.py",
        "second = {(child + 1) % count: (parent + 1) % count for",
        "second = {(child + 2) % count: (parent + 2) % count for",
        ("topoplan/schedules/binary_trees.py", "tests/topoplan/schedules/test_binary_trees.py"),
    ),
    Bug(
        "schedules-double-wires",
        "lost factor",
        "topoplan/schedules/ring.py",
        "lanes[src][dst] = link.count * (wire // candidate)",
        "lanes[src][dst] = wire // candidate",
        ("topoplan/schedules/ring.py", "tests/topoplan/schedules/test_ring.py"),
    ),
    # topoplan: model
    Bug(
        "model-chunk-count",
        "off by one",
        "topoplan/model/closed_form.py",
        "math.ceil(share * nbytes / chunk_bytes)",
        "math.floor(share * nbytes / chunk_bytes)",
        ("topoplan/model/closed_form.py", "tests/topoplan/model/test_simulation.py"),
    ),
    Bug(
        "model-busy-link",
        "missing barrier",
        "topoplan/model/event_simulation.py",
        "busy[number] = True",
        "busy[number] = False",
        ("tests/topoplan/model/test_simulation.py",),
    ),
    Bug(
        "model-algorithm-bandwidth",
        "wrong unit",
        "topoplan/model/closed_form.py",
        "return self.nbytes / self.seconds / 1e9",
        "return self.nbytes / self.seconds / 2**30",
        ("topoplan/model/closed_form.py", "tests/topoplan/model/test_simulation.py"),
    ),
    # topoplan: operate
    Bug(
        "operate-fitted-bandwidth",
        "wrong unit",
        "topoplan/operate/calibration/fit.py",
        "HockneyLine(alpha, 1e-9 / slope,",
        "HockneyLine(alpha, 1e-6 / slope,",
        ("topoplan/operate/calibration/fit.py", "tests/topoplan/operate/test_calibration_fit.py"),
    ),
    Bug(
        "operate-slow-link",
        "swapped operands",
        "topoplan/operate/faults.py",
        "link.bandwidth < SLOW * wanted.bandwidth",
        "wanted.bandwidth < SLOW * link.bandwidth",
        ("topoplan/operate/faults.py", "tests/topoplan/operate/test_diagnosis.py"),
    ),
    Bug(
        "operate-missing-nic",
        "off by one",
        "topoplan/operate/diagnosis.py",
        "if count < usual",
        "if count < usual - 1",
        ("tests/topoplan/operate/test_diagnosis.py",),
    ),
    # topoplan: engines
    Bug(
        "engines-msccl-dependency",
        "missing barrier",
        "topoplan/engines/msccl_write.py",
        "int(block.needed)",
        "int(False)",
        ("tests/topoplan/engines/test_msccl.py",),
    ),
    Bug(
        "engines-tuner-range",
        "off by one",
        "topoplan/engines/nccl/tuner_file.py",
        "following.start - 1",
        "following.start",
        ("topoplan/engines/nccl/tuner_file.py", "tests/topoplan/engines/test_nccl_tuner.py"),
    ),
    Bug(
        "engines-net-number",
        "wrong index",
        "topoplan/engines/nccl/topology_file.py",
        'number += max(1, len(device.fact("adapter").split("+")))',
        "number += 1",
        ("tests/topoplan/engines/test_export_nccl_topo.py",),
    ),
    # topoplan: cli
    Bug(
        "cli-check-status",
        "missing refusal",
        "topoplan/cli/check.py",
        "status=1 if wrong else 0,",
        "status=0,",
        ("tests/topoplan/cli/test_check.py",),
    ),
    Bug(
        "cli-bandwidth-unit",
        "wrong unit",
        "topoplan/cli/arguments.py",
        "value = parse_bandwidth(text, unit=unit) / own",
        "value = parse_bandwidth(text, unit=unit)",
        ("tests/topoplan/cli/test_machine_options.py",),
    ),
    # collectives: tables
    Bug(
        "tables-write-after-read",
        "missing barrier",
        "collectives/tables/lowering.py",
        "conflicts.update(readers.get(destination, ()))",
        "conflicts.update(())",
        (
            "collectives/tables/lowering.py",
            "tests/collectives/tables/test_lowering.py",
        ),
    ),
    Bug(
        "tables-last-chunk",
        "off by one",
        "collectives/tables/lowering.py",
        "-(-np.diff(bounds) // chunk_elements)",
        "np.diff(bounds) // chunk_elements",
        (
            "collectives/tables/lowering.py",
            "tests/collectives/tables/test_lowering.py",
        ),
    ),
    Bug(
        "tables-block-of-period",
        "wrong index",
        "collectives/tables/transfer_table.py",
        "return element - start - element // period * skip",
        "return element - start",
        (
            "collectives/tables/transfer_table.py",
            "tests/collectives/backends/test_exchanges.py",
        ),
    ),
    Bug(
        "tables-negative-average",
        "sign",
        "collectives/tables/numpy_arrays.py",
        "wide -= np.fmod(wide, ranks)",
        "wide += np.fmod(wide, ranks)",
        (
            "collectives/tables/numpy_arrays.py",
            "tests/collectives/backends/test_loopback.py",
        ),
    ),
    # collectives: peers
    Bug(
        "peers-minority-goes-on",
        "missing refusal",
        "collectives/peers/membership_protocol.py",
        "half < 0 or (half == 0 and before[0] not in left)",
        "half < -len(before)",
        ("tests/collectives/peers/test_survivors.py",),
    ),
    Bug(
        "peers-first-failure",
        "swapped operands",
        "collectives/peers/control_page.py",
        "return min(found, key=lambda failure: failure.time",
        "return max(found, key=lambda failure: failure.time",
        ("tests/collectives/peers/test_shared_memory.py",),
    ),
    Bug(
        "peers-whole-message",
        "off by one",
        "collectives/peers/rendezvous_state.py",
        "if len(self._data) < 4 + length:",
        "if len(self._data) <= 4 + length:",
        (
            "collectives/peers/rendezvous_state.py",
            "tests/collectives/peers/test_survivors.py",
        ),
    ),
    Bug(
        "peers-plans-differ",
        "missing check",
        "collectives/peers/agreement.py",
        "if digest != digests[PLANNER]:",
        "if not digest:",
        ("tests/jobs/test_plan_by_one.py::test_a_plan_that_another_rank_has_read_differently_is_refused",),
    ),
    # collectives: backends
    Bug(
        "backends-stale-root",
        "stale cache",
        "collectives/backends/plan_and_chunk_store.py",
        "key = (collective, root)",
        "key = (collective, self._given.root)",
        (
            "tests/collectives/backends/test_loopback.py::test_an_allreduce_plan_runs_all_five_collectives_exactly",
        ),
    ),
    Bug(
        "backends-stale-chunk",
        "stale cache",
        "collectives/backends/plan_and_chunk_store.py",
        "return plan, self.backend, 1 <<",
        'return "", self.backend, 1 <<',
        ("tests/collectives/backends/test_chunk_size.py",),
    ),
    Bug(
        "backends-divisible-length",
        "missing refusal",
        "collectives/backends/request.py",
        "if length % ranks:",
        "if length < ranks:",
        ("tests/collectives/backends/test_loopback.py",),
    ),
    Bug(
        "shared-average",
        "lost factor",
        "collectives/backends/shared/host_program.py",
        "lines.append((DIVIDE, [], total))",
        "lines += []",
        (
            "tests/collectives/backends/test_shared_run.py",
            "tests/collectives/backends/test_repeats.py",
        ),
    ),
    Bug(
        "shared-ring-slot",
        "wrong index",
        "collectives/backends/shared/host_program.py",
        "(rank * RING + number % RING)",
        "(rank + number % RING)",
        (
            "tests/collectives/backends/test_mpi_program.py",
            "tests/collectives/backends/test_shared_run.py",
        ),
    ),
    Bug(
        "shared-slot-in-use",
        "missing barrier",
        "collectives/backends/shared/shared_program.py",
        "freeing = np.flatnonzero(following >= 0)",
        "freeing = np.flatnonzero(following < -1)",
        ("tests/collectives/backends/test_mpi_program.py",),
    ),
    Bug(
        "tcp-forward-before-arrival",
        "missing barrier",
        "collectives/backends/tcp/collective_state.py",
        "-1 if arrives or one.written is None else here[one.written]",
        "-1",
        ("tests/collectives/backends/test_tcp.py",),
    ),
    Bug(
        "tcp-own-block",
        "wrong index",
        "collectives/backends/tcp/collective_state.py",
        "place_in(memory.given, part.start)",
        "part.start",
        (
            "tests/collectives/backends/test_tcp.py",
            "tests/collectives/backends/test_exchanges.py",
        ),
    ),
    Bug(
        "tcp-stranger",
        "missing check",
        "collectives/backends/tcp/connections.py",
        'introduction["token"] == self._token',
        'introduction["token"] != ""',
        (
            "tests/collectives/peers/test_tcp_meeting.py::test_strangers_and_garbage_at_the_ports_do_not_disturb_a_job",
        ),
    ),
    Bug(
        "nccl-lost-partial-sum",
        "lost residual",
        "collectives/backends/nccl/tree_steps.py",
        "before.keeps, takes.behind, takes.own = True, before, KEPT",
        "before.keeps, takes.behind, takes.own = True, before, GIVEN",
        ("tests/ptx/test_ptx_forest.py::test_ranks_that_add_in_two_stages_keep_the_first_sum",),
    ),
    Bug(
        "nccl-shared-gpu-memory",
        "lost factor",
        "collectives/backends/nccl/device_arenas.py",
        "wanted = gpus[one.host, one.gpu] * nbytes + SPARE",
        "wanted = nbytes + SPARE",
        ("tests/collectives/backends/test_windows.py",),
    ),
    Bug(
        "stepped-double-buffer",
        "missing barrier",
        "collectives/backends/stepped_program.py",
        "scratch + steps % 2 * area + within",
        "scratch + within",
        (
            "tests/collectives/backends/test_torch_program.py",
            "tests/collectives/backends/test_contract.py",
        ),
    ),
    Bug(
        "stepped-scratch-depth",
        "off by one",
        "collectives/backends/stepped_program.py",
        "np.where(used, first, 0) + 2, groups)",
        "np.where(used, first, 0), groups)",
        ("tests/collectives/backends/test_torch_program.py",),
    ),
    Bug(
        "mpi-note-of-first",
        "wrong index",
        "collectives/backends/mpi/mpi_transport.py",
        "memory[place * LENGTH : (place + 1) * LENGTH]",
        "memory[:LENGTH]",
        ("tests/jobs/test_mpi.py::test_ranks_that_differ_refuse_and_continue[mixed]",),
    ),
    Bug(
        "torch-last-sum",
        "off by one",
        "collectives/backends/torch/torch_backend.py",
        "in leaving), waiting, (), (), (), ())",
        "in leaving), (), (), (), (), ())",
        ("tests/collectives/backends/test_torch_program.py",),
    ),
    Bug(
        "torch-overwritten-send",
        "missing barrier",
        "collectives/backends/torch/torch_backend.py",
        "if at <= place - SEND_STEPS or _place(one) in writes",
        "if at <= place - SEND_STEPS",
        ("tests/collectives/backends/test_torch_program.py",),
    ),
    Bug(
        "loopback-place-of-result",
        "wrong index",
        "collectives/backends/loopback/loopback_backend.py",
        "one.result[start - one.block[0] : stop - one.block[0]]",
        "one.result[: stop - start]",
        ("tests/collectives/backends/test_loopback.py",),
    ),
    Bug(
        "loopback-paced-link",
        "wrong unit",
        "collectives/backends/loopback/paced_loopback.py",
        "(bandwidth * scale * 1e9)",
        "(bandwidth * scale * 8e9)",
        ("tests/collectives/backends/test_loopback.py",),
    ),
    # collectives: sparse
    Bug(
        "selection-nan",
        "missing check",
        "collectives/sparse/selection/topk.py",
        "(chosen.bits & data.mask) > data.infinity",
        "(chosen.bits & data.mask) > data.mask",
        ("tests/collectives/sparse/test_topk.py",),
    ),
    Bug(
        "selection-certain-entries",
        "off by one",
        "collectives/sparse/selection/topk.py",
        "np.searchsorted(reached, k)",
        'np.searchsorted(reached, k, "right")',
        (
            "tests/collectives/sparse/test_topk.py",
            "tests/collectives/sparse/test_gpu_topk.py",
        ),
    ),
    Bug(
        "selection-surplus-lost",
        "lost residual",
        "collectives/sparse/selection/error_feedback.py",
        "put_back(data.bits, others.indices, others.bits)",
        "put_back(data.bits, others.indices[:0], others.bits[:0])",
        ("tests/collectives/sparse/test_error_feedback.py",),
    ),
    Bug(
        "selection-buffer-in-use",
        "stale cache",
        "collectives/sparse/selection/error_feedback.py",
        "sys.getrefcount(self._results[place]) <= FREE_REFERENCES",
        "place >= 0",
        ("tests/collectives/sparse/test_error_feedback.py",),
    ),
    Bug(
        "codec-checksum",
        "missing check",
        "collectives/sparse/codec.py",
        "if check != zlib.crc32(raw[:_CHECK_AT] + bytes(4) + raw[_CHECK_AT + 4 :]):",
        "if check < 0:",
        ("tests/collectives/sparse/test_codec.py",),
    ),
    Bug(
        "codec-not-finite",
        "missing check",
        "collectives/sparse/codec.py",
        "fixed.scales[np.flatnonzero(~finite) // block] = np.nan",
        "np.flatnonzero(~finite)",
        ("tests/collectives/sparse/test_codec.py",),
    ),
    Bug(
        "codec-biased-rounding",
        "wrong bound",
        "collectives/sparse/quantization.py",
        "int(uniform < value - below)",
        "int(uniform < 0.5)",
        ("tests/collectives/sparse/test_quantization.py",),
    ),
    Bug(
        "codec-index-gap",
        "off by one",
        "collectives/sparse/index_packing.py",
        "index += quotient * modulus + remainder + 1",
        "index += quotient * modulus + remainder",
        ("tests/collectives/sparse/test_index_packing.py",),
    ),
    Bug(
        "residuals-loss-scale",
        "swapped operands",
        "collectives/sparse/residuals.py",
        "factor, whole = scale / self.scale, self.whole",
        "factor, whole = self.scale / scale, self.whole",
        ("tests/collectives/training/test_gradient_synchronizer.py",),
    ),
    Bug(
        "residuals-rounding-error",
        "lost residual",
        "collectives/sparse/exchanges.py",
        "arrays.add(residuals[rank].whole.residual, one.lost)",
        "arrays.add(residuals[rank].whole.residual.copy(), one.lost)",
        ("tests/collectives/sparse/test_sparse_all_reduce.py",),
    ),
    # collectives: communicator
    Bug(
        "communicator-slow-streak",
        "off by one",
        "collectives/communicator/link_monitor.py",
        "return since if times + 1 >= least else None",
        "return since if times + 2 >= least else None",
        ("tests/collectives/communicator/test_what_is_slow.py",),
    ),
    Bug(
        "communicator-slow-share",
        "swapped operands",
        "collectives/communicator/link_monitor.py",
        "found.rate / found.healthy",
        "found.healthy / found.rate",
        ("tests/collectives/communicator/test_what_is_slow.py",),
    ),
    Bug(
        "communicator-root-after-loss",
        "wrong index",
        "collectives/communicator/recovery.py",
        "kept.index(given.root) if given.root in kept",
        "given.root if given.root in kept",
        ("tests/collectives/communicator/test_shrink.py",),
    ),
    # collectives: training
    Bug(
        "training-weight-decay",
        "sign",
        "collectives/training/trust_ratios.py",
        "(gradient_norm + weight_decay * weight_norm)",
        "(gradient_norm - weight_decay * weight_norm)",
        (
            "collectives/training/trust_ratios.py",
            "tests/collectives/training/test_optimizers.py",
        ),
    ),
    Bug(
        "training-gossip",
        "sign",
        "collectives/training/averaging.py",
        "wide - weight * (wide - pulled[key])",
        "wide + weight * (wide - pulled[key])",
        ("tests/collectives/training/test_modes.py",),
    ),
    Bug(
        "training-low-rank-residual",
        "lost residual",
        "collectives/training/low_rank.py",
        "line[at.start : at.stop] -= share",
        "line[at.start : at.stop] = 0",
        (
            "collectives/training/low_rank.py",
            "tests/collectives/training/test_gradient_filters.py",
        ),
    ),
    Bug(
        "training-ranks-with-data",
        "swapped operands",
        "collectives/training/buckets.py",
        "return self._ranks / self.present if",
        "return self.present / self._ranks if",
        (
            "collectives/training/buckets.py",
            "tests/collectives/training/test_uneven.py",
        ),
    ),
    # collectives: torch
    Bug(
        "torch-splits",
        "wrong index",
        "collectives/torch/group_arguments.py",
        "if sent[peer] != received[rank]:",
        "if sent[peer] != received[peer]:",
        (
            "collectives/torch/group_arguments.py",
            "tests/jobs/test_torch_scenarios.py",
        ),
    ),
    Bug(
        "torch-merged-residual",
        "lost residual",
        "collectives/torch/parameter_residuals.py",
        "ParameterResidual(self.residual + other.residual, velocity)",
        "ParameterResidual(self.residual, velocity)",
        ("tests/collectives/torch/test_parameter_residuals.py",),
    ),
    Bug(
        "torch-finished-twice",
        "missing check",
        "collectives/torch/futures.py",
        "self._over = True",
        "self._over = False",
        ("tests/collectives/torch/test_futures.py",),
    ),
    # collectives: lab
    Bug(
        "lab-bus-bandwidth",
        "swapped operands",
        "collectives/lab/benchmark.py",
        "busbw=algbw * bus_factor(plan.collective, size)",
        "busbw=algbw / bus_factor(plan.collective, size)",
        ("tests/collectives/lab/test_benchmark.py",),
    ),
    Bug(
        "lab-wrong-elements",
        "missing check",
        "collectives/lab/chaos_draws.py",
        "return int(np.count_nonzero(found != wanted))",
        "return int(np.count_nonzero(found < wanted))",
        (
            "collectives/lab/chaos_draws.py",
            "tests/collectives/lab/test_chaos_draws.py",
        ),
    ),
    Bug(
        "lab-shaped-rate",
        "wrong unit",
        "collectives/lab/testbed/network.py",
        "rate = round(bandwidth * 8e9 * scale)",
        "rate = round(bandwidth * 1e9 * scale)",
        (
            "collectives/lab/testbed/network.py",
            "tests/collectives/lab/test_testbed.py",
        ),
    ),
)
