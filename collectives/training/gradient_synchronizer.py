"""Average gradients over all ranks in training loops without torch: arrays of numpy or CuPy, bucket by bucket."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.open_backend import BackendSettings
from collectives.communicator.communicator import Communicator
from collectives.communicator.job_plan import PlanLike, open_backend_for_plan
from collectives.peers.agreement import check_on_all
from collectives.training.averaging import OuterAverager, average_parameters, make_averager
from collectives.training.buckets import (
    BUCKET_BYTES,
    BucketExchange,
    BucketMemory,
    DataPresence,
    GradientShapes,
    buckets_of,
    share_failure,
)
from collectives.training.checkpoint_state import (
    EMPTY_STATE,
    OUTER_STATE,
    check_list_of_states,
    check_states,
    describe_state,
    listed_states,
    pack_arrays,
    send_to_joining_ranks,
    unpack_arrays,
    unscaled_state,
    warn_of_unused_state,
)
from collectives.training.exchange_settings import (
    Compression,
    DeprecatedOptions,
    ExchangeSettings,
    GivenScale,
    LossScale,
    Shrink,
    current_options,
    refuse_compression_as_plan,
    warn_of_deprecated,
)
from collectives.training.gradient_estimates import check_saved_estimates
from collectives.training.gradient_filters import Cast
from collectives.training.modes import (
    ASP,
    BSP,
    LOCAL_MODES,
    SSP,
    Gossip,
    LocalSGD,
    Mode,
    OuterMode,
    Proximal,
    mode_of,
)
from collectives.training.outer_optimizers import check_rounds_in_flight
from collectives.training.report import Recorder, log_start, register_recorder
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError

FORMAT = "topoplan.gradients/2"
"""Format of a checkpoint state: residuals are in units of a loss scale of 1."""

EARLIER = "topoplan.gradients/1"
"""Residuals in units of the gradients at that time."""


class GradientSynchronizer:
    """Averages the gradients of a model over all ranks, step by step.

    Gradients travel in buckets, in the reverse order of the parameters; one bucket is exchanged while the next is
    filled. All ranks must have the same parameters and settings, and make the same calls; the constructor compares them
    once.

    Invalid arguments raise `UsageError` before any array is written, and `BackendError` on the other ranks, so that
    none waits. If another rank fails, or does not make the same call within the timeout, every method raises
    `BackendError`, with training step and bucket; each out array is then complete or untouched.

    Parameters
    ----------
    parameters : list of arrays; with several ranks in this process a list of such lists
        Give shapes and dtypes of the gradients. Arrays may be empty, and of several dtypes.
    plan : Plan, SizePlans, str, path or Topology, optional
        A plan, its file, or the machine whose GPUs the ranks are, also by its name in the library. With None the ranks
        of mpi, shared and tcp agree on one (`collectives.communicator.job_topology`): the processes as placed on their
        hosts, without GPUs.
    backend : str or Backend
        A given back end stays open if the constructor raises; `close` closes either.
    bucket_bytes : int or str
        Longest bucket; a longer array has a bucket of its own.
    compression : TopK, CommonRows, LowRank, Quantize, Threshold or Cast, optional
        Compression of the gradients (docs/compression.md compares the methods); by default none.
    sync : BSP, SSP, ASP, LocalSGD, DiLoCo, SparseLoCo, Gossip or str, optional
        How asynchronous ranks may be (`collectives.training.modes`), also by name, as "ssp:2"; BSP by default.
    fault_tolerance : Shrink, optional
        Continue with the survivors of a failed rank, if the back end can (``on_failure="shrink"`` of `Communicator`);
        by default a failed rank is an error. A bucket is averaged over the ranks whose gradients were added up, even if
        in one step these are four in the first buckets and three in the others; all survivors get the same bits. The
        residuals of the failed rank are lost, those of the others are used as before. `recorder` and
        `collectives.report` list failed ranks with step and bucket. Not with SSP, ASP and Gossip. With a join token
        this process joins in place of a failed rank: the others admit it by `grow`, which it must call first; plan,
        back end and its engine are those of the others, and the other settings must be the same as theirs.
    loss_scale : float, callable or GradScaler, optional
        Factor of gradients, the same on all ranks: the number, a function that returns it, or an object with
        ``get_scale()``, asked once a step. Residuals follow it; without it, residuals of one scale are added to
        gradients of another. If an average is not finite, all ranks see that, and residuals are as before the step:
        skip the step, as GradScaler does.
    timeout : float
        Seconds that a rank waits for the others; while they agree on a plan, as long as one of them makes it.
    engine, exact
        For the back end between GPUs, as in `Communicator`.
    name : str
        Name of the recorder.
    **deprecated
        Keywords of earlier versions: density, exchange, momentum, wire (`TopK`), low_rank, codes (`Quantize`),
        significance (`Threshold`), mode (``sync``), on_failure, on_change, invitation (`Shrink`).

    Attributes
    ----------
    communicator : Communicator
    recorder : Recorder
        Records exchanges, and counts steps.
    buckets : tuple of Bucket

    Raises
    ------
    UsageError
        An argument is invalid, ranks differ in parameters or settings, or the plan is for another number of ranks.
    BackendError
        The rendezvous of the ranks failed.

    Examples
    --------
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("v100x4"))
    >>> parameters = [[np.zeros((2, 2)), np.zeros(3)] for rank in range(4)]
    >>> with GradientSynchronizer(parameters, plan, backend="loopback") as synchronizer:
    ...     averages = synchronizer.step([[np.full((2, 2), float(rank)), np.arange(3.0)] for rank in range(4)])
    >>> averages[3]
    [array([[1.5, 1.5],
           [1.5, 1.5]]), array([0., 1., 2.])]
    """

    def __init__(
        self,
        parameters: Any,
        plan: PlanLike | None = None,
        *,
        backend: str | Backend[Any] = "mpi",
        compression: Compression | None = None,
        sync: Mode | str | None = None,
        fault_tolerance: Shrink | None = None,
        bucket_bytes: int | str = BUCKET_BYTES,
        loss_scale: GivenScale | None = None,
        timeout: float = 30.0,
        engine: str = "auto",
        exact: bool = True,
        name: str = "gradients",
        **deprecated: Unpack[DeprecatedOptions],
    ) -> None:
        warn_of_deprecated("GradientSynchronizer", deprecated)
        refuse_compression_as_plan(plan, "GradientSynchronizer(parameters, {})")
        compression, sync, shrink = current_options(
            deprecated, compression=compression, sync=sync, fault_tolerance=fault_tolerance
        )
        how = ExchangeSettings(compression, mode_of(sync, "sync"))
        self.mode, self._sparse = how.mode, how.top_k is not None
        self._ef21 = None if how.top_k is None else how.top_k.ef21
        self._momentum = 0.0 if how.top_k is None else how.top_k.momentum
        if shrink is not None and self._ef21 is not None:
            replace(how, shrinks=True)  # which refuses them together
        if isinstance(compression, Cast) and not isinstance(how.mode, BSP):
            raise UsageError(f"compression Cast needs steps that wait for all ranks, got sync {how.mode}")
        join_token = None if shrink is None else shrink.join_token
        scale = LossScale(loss_scale)
        self._joining = join_token is not None
        opened: Backend[Any] | None = None
        try:
            if join_token is None:
                opened, job_plan = open_backend_for_plan(
                    backend, plan, BackendSettings(timeout, engine=engine, exact=exact)
                )
                comm = Communicator(
                    job_plan, opened, timeout=timeout, on_failure="shrink" if shrink else "raise"
                )
            else:
                comm = Communicator.join(join_token, wait=timeout)
            self.communicator = comm
            self.recorder = register_recorder(Recorder(name, ranks=comm.size))
            self.recorder.among = self._among = comm.original_ranks
            self._on_change, self._notes = None if shrink is None else shrink.on_change, 0
            with self._refuse_on_error("making the synchronizer"):
                self._shapes = GradientShapes(parameters, comm.ranks, comm.one_rank, comm.arrays)
                if how.top_k is not None:
                    how.top_k.check_names([f"{number}" for number in range(len(self._shapes))])
                if how.top_k is not None and how.top_k.per == "model":
                    bucket_bytes = sys.maxsize
                self.buckets = buckets_of(self._shapes.gradients, bucket_bytes=bucket_bytes)
                self._check_recoverable()
                memory = self._memory(how, self._shapes.lists(parameters, "parameter"))
            self._signature = f"{len(self._shapes)} parameters in {len(self.buckets)} buckets, {how}"
            if not self._joining:
                self._agree(self._signature)
            self._averager = make_averager(comm, how, self.recorder, timeout=timeout, loss_scale=scale)
            self._exchange = BucketExchange(comm, self._averager, memory, self._shapes.shapes)
            self._averaged = self._confirmed_step = 0
            # place of a rank of this process that had data in the last step with data
            self._last_with_data = 0
            self._diverged = False
            self._proximal: Proximal | None = None
            if isinstance(self.mode, LocalSGD) and self.mode.proximal:
                first = self._shapes.lists(parameters, "parameter")
                self._proximal = Proximal(self.mode.proximal, comm.arrays, first)
            self._outer = self._averager if isinstance(self._averager, OuterAverager) else None
            if self._outer is not None and not self._joining:
                with self._refuse_on_error("making the synchronizer"):
                    self._outer.hold(self._outer.named(self._by_parameter(parameters)))
            log_start(comm, how)
        except BaseException:
            if opened is not None and opened is not backend:
                opened.close()
            elif self._joining and hasattr(self, "communicator"):
                self.communicator.close()
            raise

    def step(self, gradients: Any, *, out: Any = None) -> Any:
        """Average all gradients of a step.

        Parameters
        ----------
        gradients : list of arrays, one for each parameter; with several ranks in this process a list of such lists
        out : as ``gradients``, optional
            Destination of the averages: the gradients themselves, or arrays that share no memory with them. By default
            new arrays.

        Raises
        ------
        UsageError
            A gradient is missing, or has another shape or dtype than its parameter. None is exchanged.
        RefusedError
            On all ranks, if each is a process: the arguments of one are invalid, or its density or loss scale raises.
            Buckets before the refused one have been exchanged; the others are not. Residuals are as before the step,
            and the next call repeats the step.
        """
        with self._exchange.others_wait():
            with self._refuse_on_error():
                self._check_calls()
                if self._exchange.given:
                    raise UsageError("gradients of this step were given with ready already; end it with wait")
                listed = self._shapes.lists(self._present(gradients), "gradient")
                outs = None if out is None else self._shapes.lists(out, "out array")
            for index in reversed(range(len(self._shapes))):
                wanted = None if outs is None else [one[index] for one in outs]
                self._exchange.put(index, [one[index] for one in listed], wanted)
        return self._finished(outs)

    def ready(self, index: int, gradient: Any) -> None:
        """Give one gradient of a step as soon as it is computed; a bucket starts when it is full.

        The gradient must not change until `wait`. Give each gradient once, in any order; buckets start in their own
        order, so the reverse order of the parameters lets them start earliest.

        `gradient` is that of the parameter `index`: an array, or with several ranks in this process a list of one for
        each. Errors are those of `step`; if each rank is a process the step is then lost: give all its gradients again.
        """
        with self._exchange.others_wait():
            with self._refuse_on_error():
                self._check_calls()
                arrays = self._shapes.one(index, gradient, "gradient")
                if index in self._exchange.given:
                    raise UsageError(f"gradient {index} was given already; give each once, then call wait")
            self._exchange.put(index, arrays, None)

    def wait(self, *, out: Any = None) -> Any:
        """End the step and return the averages of the gradients given with `ready`; errors are those of `step`.

        If only ``out`` is invalid, no other rank waits for this one: the step continues, and another call of `wait`
        ends it.
        """
        with self._refuse_on_error():
            missing = sorted(set(range(len(self._shapes))) - self._exchange.given)
            if missing:
                listed = ", ".join(map(str, missing[:8])) + ", …" * (len(missing) > 8)
                raise UsageError(
                    f"gradients missing in this step: {listed}; give zeros for a parameter without one"
                )
        try:
            outs = None if out is None else self._shapes.lists(out, "out array")
        except UsageError as error:
            raise UsageError(f"training step {self.recorder.step}: {error}") from error
        return self._finished(outs)

    @contextlib.contextmanager
    def join(
        self,
        *,
        use: Callable[[Any], object] | None = None,
        parameters: Any = None,
        divide_by: str = "present",
    ) -> Iterator[None]:
        """Context of a loop in which ranks have unequal numbers of batches: ``with synchronizer.join(use=use): …``.

        A rank that leaves the block gives zeros and its residuals until all have left it. All ranks must enter it
        together. If this process has several ranks, `step` takes None in place of the gradients of ranks that have run
        out of data.

        Parameters
        ----------
        use : callable, optional
            Takes the averages of a step, as the optimizer does. It is called for the steps of the others too, so that
            all ranks end with the same parameters and moments.
        parameters : as those given to the constructor, writeable, optional
            In place of ``use``: get the values of a rank that had data to the end. Moments of an optimizer are each
            rank's own then.
        divide_by : str
            "present" for the ranks that have data in a step; "all" for all of them, which gives all samples the same
            weight.

        Raises
        ------
        UsageError
            Neither ``use`` nor ``parameters`` is given, or both; the mode is not `BSP`; gradients are integers, which
            are not divided by the ranks present.
        BackendError
            Another rank failed, or raised an error inside the block.
        """
        comm = self.communicator
        with self._refuse_on_error("joining"):
            if comm.on_failure == "shrink" and (use is None or divide_by == "present"):
                raise UsageError(
                    "join with fault_tolerance=Shrink() needs use=... and divide_by='all': survivors do not know "
                    "whether a failed rank had data"
                )
            if (use is None) == (parameters is None):
                raise UsageError(
                    "join needs either use=..., which takes the averages as the optimizer does, or parameters=...; "
                    "else ranks that run out of data keep old parameters"
                )
            if not isinstance(self.mode, BSP):
                raise UsageError(f"join needs mode bsp, whose steps wait for all ranks, got {self.mode}")
            if self._ef21 is not None:
                raise UsageError(
                    "join divides by the ranks with data, and ef21 keeps what the others have sent; leave one out"
                )
            whole = sorted({one.dtype for one in self.buckets if "int" in one.dtype or one.dtype == "bool"})
            if whole and divide_by == "present":
                raise UsageError(
                    f"averages of {whole[0]} are not divided by the ranks present; use divide_by='all'"
                )
            weights = None if parameters is None else self._shapes.lists(parameters, "parameter")
            presence = DataPresence(comm.size, self._total, here=len(comm.ranks), divide_by=divide_by)
        self._exchange.presence = presence
        try:
            with share_failure(comm, "inside join"):
                yield
            with self._refuse_on_error("leaving join"):
                self._check_between_steps()
            presence.here = 0
            last = True
            with share_failure(comm, "inside join"):
                while presence.ask(self.recorder.step):
                    last = False
                    averages = self.step(self._zeros() if comm.one_rank else [None] * len(comm.ranks))
                    if use is not None:
                        use(averages)
            if weights is not None:
                self._copy_from_last(weights, last)
        finally:
            self._exchange.presence = None

    def grow(self, arrays: Any) -> tuple[int, ...]:
        """Let joining ranks take the places of failed ones, and send them the state of the others.

        All ranks call it at the same steps, each time or every so many; it costs two agreements of short texts. A rank
        made with a join token calls it first, and then has the step and the arrays of the others, without
        residuals; in `LocalSGD` its parameters are those of one of them.

        Parameters
        ----------
        arrays : list of arrays
            All that steps change: parameters, moments. Those of a joining rank are changed in place.

        Returns
        -------
        tuple of int
            The ranks that joined, by their numbers from now on.

        Raises
        ------
        UsageError
            A step is not over; or a joining rank has other parameters, settings or arrays, and the others exclude it.
        """
        comm = self.communicator
        with self._refuse_on_error("growing"):
            self._check_between_steps()
            if self._outer is not None and self._outer.optimizer.in_flight:
                raise UsageError(
                    f"grow() must be called between rounds of {self.mode}, got a round whose exchange is in flight; "
                    "call it when delay steps have passed since the last round"
                )
            if self._exchange.presence is not None:
                raise UsageError(
                    "grow() must be called outside of join, which a joining rank has not entered"
                )
            if comm.on_failure != "shrink" or not comm.one_rank:
                raise UsageError("grow() needs fault_tolerance=Shrink() and a process for each rank")
        if not self._joining:
            comm.grow()  # a joined rank may fail before some others return, so all ranks agree below
        with self._refuse_on_error("growing"):
            joined = send_to_joining_ranks(
                comm,
                arrays,
                has_it=not self._joining,
                signature=f"{self._identity()['layout']} {self._signature}",
                give=lambda: pack_arrays(self._common()),
                take=lambda text: self._take_common(unpack_arrays(text)),
            )
        self._joining = False
        return tuple(rank for rank, seat in enumerate(comm.original_ranks) if seat in joined)

    def after_step(self, parameters: Any) -> None:
        """Average or mix parameters if the mode is due; call it in every step after the optimizer.

        `LocalSGD` averages the parameters, `DiLoCo` and `SparseLoCo` move them by the outer optimizer, `Gossip` mixes
        them with a neighbour's, in place, and other modes do not touch them; the next step without this call is a
        `UsageError`. They are as those given to the constructor.
        """
        self._confirmed_step = self.recorder.step
        if self._averaged < self._averager.due:
            meets = self._averager.mix_meets
            try:
                with self.communicator._in_step() if meets else contextlib.nullcontext():
                    with self._refuse_on_error("after_step") if meets else contextlib.nullcontext():
                        listed = self._by_parameter(parameters)
                    self._averager.mix(listed)
            finally:
                if self._outer is not None:  # a failed round is over: its parameters are those before it
                    self._averaged = self._averager.due
            self._report_change()
            self._averaged, self._diverged = self._averager.due, isinstance(self.mode, Gossip | OuterMode)
            if self._proximal is not None:
                self._proximal.averaged(self._shapes.lists(parameters, "parameter"))
        elif self._outer is not None:
            self._outer.hold(self._outer.named(self._by_parameter(parameters)))
        elif self._proximal is not None:
            self._proximal.moved(self._shapes.lists(parameters, "parameter"))

    def finish(
        self, parameters: Any = None, *, use: Callable[[list[Any]], object] | None = None
    ) -> list[Any] | None:
        """Give all ranks the same parameters, bit for bit: call it after the last step, before a test or a checkpoint.

        `SSP` and `ASP` use late gradients first; then, and with `LocalSGD` and `Gossip` too, the parameters are
        averaged. With `BSP` they are the same already. All ranks must call it. Training may continue afterwards.

        Parameters
        ----------
        parameters : as those given to the constructor, writeable
            Changed in place. None averages nothing.
        use : callable, optional
            Takes the averages of a step, as the optimizer does; for `SSP` and `ASP`.

        Returns
        -------
        list of arrays or None
            With `SSP` and `ASP` and without ``use``: the late gradients, an array for each parameter, to be used like
            the averages of one more step, and like them times the loss scale.

        Raises
        ------
        UsageError
            `LocalSGD` or `Gossip` lack the parameters, or `SSP` and `ASP` have them without ``use``.
        """
        stale = isinstance(self.mode, SSP | ASP)
        averages = isinstance(self.mode, LocalSGD | Gossip)  # outer modes may have nothing to exchange
        with self._refuse_on_error("finish") if averages else contextlib.nullcontext():
            if isinstance(self.mode, LOCAL_MODES) and parameters is None and self._diverged:
                raise UsageError(
                    f"each rank has parameters of its own after {self.mode}; give them: finish(parameters)"
                )
        if stale and parameters is not None and use is None:
            raise UsageError(
                f"finish(parameters) in {self.mode} needs use=..., which takes late gradients as the optimizer does "
                "before parameters are averaged"
            )
        rest = None
        if stale:
            left, scale = self._averager.finish(), self._averager.loss_scale()
            rest = self._exchange.rest({key: one if scale == 1 else one * scale for key, one in left.items()})
            if use is not None:
                with share_failure(self.communicator, "inside finish"):
                    use(rest)
            if parameters is None:
                # no rank continues before all have the late gradients: one of the next step would be taken for late
                self.communicator.all_reduce(max(rest, key=lambda one: one.size).reshape(-1)[:1] + 0)
        if parameters is not None and not isinstance(self.mode, BSP):
            self._average(parameters)
        return rest if use is None else None

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state of this process: steps so far, residuals, filter state, as copies.

        Each process saves its own. Raises `UsageError` inside a step.
        """
        self._check_between_steps()
        pulled = {} if self._proximal is None else {"proximal": self._proximal.state()}
        if self._outer is not None:
            pulled["outer"] = self._outer.outer_state()
        return {
            **self._identity(),
            "held": list(self.communicator.ranks),
            "step": self.recorder.step,
            "residuals": self.communicator.sparse_state(),
            "filters": self._averager.filter_state(),
            **pulled,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state_dict` returned on the same rank, bit for bit; all ranks must call it.

        A state of another number of ranks restores the step alone, and one of other settings what still applies: one
        warning lists what is lost, with counts. A state of format 1 is taken in units of the present loss scale:
        restore the scaler first.

        `DiLoCo` and `SparseLoCo` restore the start of a round and the momentum from a state of any number of ranks.
        Each rank then gets the mean residual of `SparseLoCo`; a process may give a list of states, so that all saved
        ranks are given by some process.

        Raises
        ------
        UsageError
            On some rank the state is of other parameters, other buckets or another rank: raised on all, and nothing has
            changed. Or this rank has joined and has not called `grow`.
        """
        if self._joining:
            raise UsageError(
                "this rank has joined and gets the state of the others; call grow in place of load_state_dict"
            )
        states = listed_states(state)
        gather = partial(self.communicator._gather_texts, about="load_state_dict")
        check_on_all(gather, lambda: self._check_states(states))
        state = states[0]
        same = self._identity()
        if state["format"] == EARLIER:
            state = unscaled_state(state, self._averager.loss_scale())
        filters = state.get("filters", EMPTY_STATE)
        residuals = {
            key: [one["residual"] for one in listed] for key, listed in state["residuals"].items() if listed
        }
        if state["ranks"] != same["ranks"]:
            self.communicator.restore_sparse_state({})
            self._averager.restore_filter(EMPTY_STATE)
            lost = [describe_state({"residuals": residuals}, of="bucket"), describe_state(filters)]
            if self._proximal is not None:
                lost.append("the anchors of parameters")
            if self._outer is not None:
                lost.append(
                    self._outer.restore_outer([(one["held"], one["outer"]) for one in states], state["ranks"])
                )
            warn_of_unused_state(
                lost, f"the state is of {state['ranks']} ranks, and this job has {same['ranks']}"
            )
        else:
            self.communicator.restore_sparse_state(state["residuals"] if self._sparse else {})
            lost = [self._averager.restore_filter(filters)]
            if not self._sparse:
                lost.append(describe_state({"residuals": residuals}, of="bucket"))
            if self._outer is not None:
                lost.append(self._outer.restore_outer([(state["held"], state["outer"])]))
            elif "outer" in state:
                lost.append(OUTER_STATE)
            warn_of_unused_state(lost, "gradients travel by other settings than when the state was saved")
            if self._proximal is not None:
                self._proximal.restore(state["proximal"])
        if self._outer is not None:
            self._averaged = self._outer.due
        self.recorder.step = self._confirmed_step = int(state["step"])

    def _check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        check_states(states)
        for one in states:
            self._check_state(one)
        check_list_of_states([one["ranks"] for one in states], self.communicator.size)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        self._check_between_steps()
        same, ranks = self._identity(), self.communicator.ranks
        for key in ("format", "layout"):
            if state.get(key) != same[key] and (key, state.get(key)) != ("format", EARLIER):
                found, wanted = str(state.get(key))[:60], str(same[key])[:60]
                raise UsageError(
                    f"the state must have {key} {wanted}, got {found}; restore it with the same parameters and "
                    "bucket_bytes"
                )
        if self._proximal is not None and "proximal" not in state:
            raise UsageError(
                f"the state was saved in another mode than {self.mode}, without the parameters of the last average; "
                "restore it with the same mode"
            )
        if self._outer is not None and "outer" not in state:
            raise UsageError(
                f"the state was saved in another mode than {self.mode}, without the start of a round; restore it with "
                "the same mode"
            )
        if isinstance(self.mode, OuterMode) and "outer" in state:
            check_rounds_in_flight(state["outer"], self.mode)
        if state["ranks"] == same["ranks"]:
            filters = state.get("filters", EMPTY_STATE)
            check_saved_estimates(filters, self._ef21, residuals=bool(state["residuals"]))
            saved = {one["momentum"] for listed in state["residuals"].values() for one in listed}
            if self._sparse and saved - {self._momentum}:
                raise UsageError(
                    f"the state must be of momentum {self._momentum}, got {', '.join(map(str, sorted(saved)))}; use "
                    "the same"
                )
        if state["ranks"] == same["ranks"] and tuple(state.get("held", ranks)) != tuple(ranks):
            raise UsageError(
                f"the state is that of ranks {list(state['held'])}, and this process has {list(ranks)}; every process "
                "loads what it saved itself"
            )

    def close(self) -> None:
        """Leave the job; closing twice is allowed."""
        self._averager.close()
        self.communicator.close()

    def __enter__(self) -> GradientSynchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _identity(self) -> dict[str, Any]:
        """Return what all ranks, and a state, must share."""
        layout = hashlib.sha256(repr((self._shapes.shapes, self.buckets)).encode()).hexdigest()[:16]
        return {"format": FORMAT, "ranks": self.communicator.size, "layout": layout}

    def _agree(self, mine: str) -> None:
        """Compare shapes, buckets and settings with all ranks; ``mine`` describes them."""
        layout = self._identity()["layout"]
        texts = self.communicator._gather_texts(f"{layout} {mine}", "settings")
        for rank, one in enumerate(texts):
            if one != texts[0]:
                theirs, first = (text.partition(" ")[2] for text in (one, texts[0]))
                raise UsageError(
                    f"rank {rank} has other parameters or settings than rank 0: {theirs}, and there {first}; "
                    "make the synchronizer with the same arguments on all ranks"
                )

    def _memory(self, how: ExchangeSettings, parameters: list[list[Any]]) -> list[BucketMemory]:
        """Return the memory of all buckets; plans sparse exchanges too, so that invalid settings raise now."""
        comm, shapes = self.communicator, self._shapes.shapes
        memory = []
        for bucket in self.buckets:
            likes = [one[bucket.members[0]] for one in parameters]
            memory.append(BucketMemory(bucket, shapes, comm, likes))
            if (sparse := how.top_k) is not None and not self._joining:
                lines = memory[-1].given or [comm.arrays.reals(comm.arrays.line(one)) for one in likes]
                given = lines[0] if comm.one_rank else lines
                comm.exchange_for(
                    given,
                    density=sparse.at(0, how.names_of(memory[-1].parts)),
                    exchange=sparse.exchange,
                    wire=sparse.wire,
                    layers=sparse.layers(memory[-1].parts),
                )
        return memory

    def _finished(self, outs: list[list[Any]] | None) -> Any:
        scale = 1.0 if self._proximal is None else self._averager.scale
        averages = self._exchange.finish(outs)
        with self.communicator._behind():
            self._report_change()
            if self._proximal is not None:
                self._proximal.add_to(averages, scale=scale)
        return averages[0] if self.communicator.one_rank else averages

    def _check_recoverable(self) -> None:
        comm = self.communicator
        if comm.on_failure != "shrink":
            return
        if not comm.one_rank:
            raise UsageError(
                f"fault_tolerance=Shrink() needs a process for each rank, and the {comm.backend} back end has all "
                "in one; leave it out"
            )
        if not isinstance(self.mode, BSP | LocalSGD | OuterMode):
            raise UsageError(
                f"fault_tolerance=Shrink() needs mode bsp or local, got {self.mode}, whose ranks wait for messages "
                "of each rank"
            )

    def _common(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the state that all ranks share besides the caller's arrays."""
        numbers = [
            self.recorder.step,
            self._averaged,
            self._confirmed_step,
            self._averager.due,
            self._diverged,
        ]
        pulled = {} if self._proximal is None else self._proximal.common()
        kept = {f"kept {name}": one for name, one in self._averager.common().items()}
        return {"numbers": np.array(numbers), "among": np.array(self._among), **pulled, **kept}

    def _take_common(self, state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        step, self._averaged, self._confirmed_step, self._averager.due, apart = map(int, state["numbers"])
        self.recorder.step, self._diverged = step, bool(apart)
        self._among = self.recorder.among = tuple(map(int, state["among"]))
        if self._proximal is not None:
            self._proximal.restore_common(state)
        kept = {name[5:]: one for name, one in state.items() if name.startswith("kept ")}
        self._averager.restore_common(kept)

    def _report_change(self) -> None:
        """Report a change of the membership, at the end of an exchange of all ranks."""
        before, self._among = self._among, self.recorder.among
        if before == self._among:
            return
        notes = self.communicator.notes
        self.recorder.explain_changes(self._averager.norm_kept(), notes[self._notes :])
        self._notes = len(notes)
        if self._on_change is not None:
            self._on_change(len(before), len(self._among))

    @contextlib.contextmanager
    def _refuse_on_error(self, when: str = "") -> Iterator[None]:
        """Refuse the step on all ranks if the arguments inside are invalid; the others would wait and lose the step."""
        try:
            yield
        except RefusedError:  # by all ranks
            self._give_up()
            raise
        except BackendError:  # of a collective, which the others have too
            raise
        except Exception as error:
            kind = "" if isinstance(error, TopoplanError) else f"{type(error).__name__}: "
            text = f"{when or f'training step {self.recorder.step}'}: {kind}{error}"
            try:
                self.communicator._refuse(text)
            except RefusedError as texts:
                raise texts from error
            except BackendError:
                pass  # the others failed, and this rank has an error of its own
            finally:
                self._give_up()
            raise UsageError(text) from error

    def _give_up(self) -> None:
        """Abandon the step that has begun, as the other ranks do; a process with all ranks keeps it."""
        if hasattr(self, "_exchange") and self.communicator.one_rank:
            self._exchange.give_up()

    def _average(self, parameters: Any) -> None:
        with self._refuse_on_error("finish") if self._outer is None else contextlib.nullcontext():
            listed = self._by_parameter(parameters)
        if self._outer is not None:
            self._outer.align(self._averager.due, self._outer.named(listed))
        else:
            average_parameters(self.communicator, self.recorder, listed)
        self._report_change()
        self._confirmed_step = self.recorder.step
        self._averaged = self._averager.due
        self._diverged = False
        if self._proximal is not None:
            self._proximal.averaged(self._shapes.lists(parameters, "parameter"))

    def _by_parameter(self, parameters: Any) -> list[Any]:
        listed = self._shapes.lists(parameters, "parameter")
        return listed[0] if self.communicator.one_rank else list(zip(*listed, strict=True))

    def _present(self, gradients: Any) -> Any:
        """Inside `join`, replace gradients that ranks of this process no longer give by zeros."""
        presence, comm = self._exchange.presence, self.communicator
        if presence is None or comm.one_rank or not isinstance(gradients, list | tuple):
            return gradients
        there = [place for place, one in enumerate(gradients) if one is not None]
        presence.here = len(there)
        self._last_with_data = there[0] if there else self._last_with_data
        return [self._zeros() if one is None else one for one in gradients]

    def _zeros(self) -> list[Any]:
        library = self.communicator.arrays
        return [
            library.of(np.zeros(shape), dtype)
            for shape, dtype in zip(self._shapes.shapes, self._shapes.dtypes, strict=True)
        ]

    def _total(self, here: int) -> int:
        """Return how many ranks of the job have data, of which this process has `here`."""
        return int(self._over_all(here, "sum"))

    def _over_all(self, number: int, op: str) -> int:
        """Reduce a number of this process's first rank with that of other processes; its other ranks give zeros."""
        comm, library = self.communicator, self.communicator.arrays
        lines = [library.wrapped(np.array([number * (not place)])) for place in range(len(comm.ranks))]
        given = lines[0] if comm.one_rank else lines
        comm.all_reduce(given, op=op, out=given)
        return int(library.values(lines[0])[0])

    def _copy_from_last(self, weights: list[list[Any]], last: bool) -> None:
        """Broadcast the parameters of a rank that had data to the end."""
        comm = self.communicator
        root = self._over_all(comm.ranks[self._last_with_data] if last else 0, "max")
        for one in zip(*weights, strict=True):
            given = one[0] if comm.one_rank else list(one)
            comm.broadcast(given, root=root, out=given)

    def _check_calls(self) -> None:
        if self._joining:
            raise UsageError(
                "this rank has joined and does not have the state of the others yet; call grow first"
            )
        if isinstance(self.mode, LOCAL_MODES) and self._confirmed_step != self.recorder.step:
            raise UsageError(
                f"{self.mode} averages parameters in after_step, which was not called in the step before; call "
                "after_step(parameters) in every step"
            )
        self._diverged = True

    def _check_between_steps(self) -> None:
        if self._exchange.given:
            raise UsageError("the step is not over; call wait first")
