"""Average gradients over all ranks in training loops without torch: arrays of numpy or CuPy, bucket by bucket."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.backends.backend import Backend
from collectives.backends.open_backend import BackendSettings
from collectives.communicator.communicator import Communicator
from collectives.communicator.job_plan import PlanLike, open_backend_for_plan
from collectives.peers.agreement import check_on_all
from collectives.training.averaging import average_parameters, make_averager
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
    describe_state,
    pack_arrays,
    send_to_joining_ranks,
    unpack_arrays,
    unscaled_state,
    warn_of_unused_state,
)
from collectives.training.exchange_settings import Density, ExchangeSettings, GivenScale, LossScale
from collectives.training.gradient_filters import IntegerCodes, Significance
from collectives.training.low_rank import LowRank
from collectives.training.modes import ASP, BSP, LOCAL_MODES, SSP, Gossip, LocalSGD, Mode, Proximal, mode_of
from collectives.training.report import Recorder, log_start, register_recorder
from topoplan.errors import BackendError, RefusedError, UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

FORMAT = "topoplan.gradients/2"
"""Of a checkpoint: what is kept of gradients is in units of a loss scale of 1."""

EARLIER = "topoplan.gradients/1"
"""In units of the gradients of then."""


class GradientSynchronizer:
    """Averages the gradients of a model over all ranks, step by step.

    Gradients travel in buckets, in the reverse order of the parameters, one exchanged while the next is filled. All
    ranks must have the same parameters and settings, and make the same calls; that is compared once, here.

    Arguments that do not fit raise `UsageError` before anything of theirs is written, and `BackendError` on the other
    ranks, so that nobody waits. Where another rank fails, `BackendError` names training step and bucket; each out array
    is then complete or untouched.

    Parameters
    ----------
    parameters : list of arrays; with several ranks in this process a list of such lists
        What gradients are for: their shapes and dtypes. Also empty arrays, and several dtypes.
    plan : Plan, SizePlans, str, path or Topology, optional
        One, its file, or the machine whose GPUs the ranks are, also by its name in the library. None lets the ranks of
        mpi, shared and tcp agree on one (`collectives.communicator.job_topology`): the processes as they lie on their
        hosts, without GPUs.
    backend : str or Backend
        One that is given stays open where no synchronizer can be made with it; `close` closes either.
    bucket_bytes : int
        Longest bucket; an array that is longer is one of its own.
    density : float, or callable from step to float, optional
        Share of every bucket's elements that is exchanged, the largest with error feedback; None for dense.
    exchange, momentum, wire
        Of sparse gradients, as `Communicator.sparse_all_reduce` takes them.
    mode : BSP, SSP, ASP, LocalSGD, Gossip or str, optional
        How far ranks may be apart (`collectives.training.modes`), also by name, as "ssp:2"; BSP by default.
    low_rank : LowRank or int, optional
        Thin matrices that travel in place of dense gradients (PowerSGD, `collectives.training.low_rank`), or their
        rank.
    codes : IntegerCodes or int, optional
        Whole numbers that travel and are added in place of dense gradients (`collectives.training.gradient_filters`),
        or their bits: 8 or 16.
    significance : Significance or float, optional
        Entries that alone travel of dense gradients (`collectives.training.gradient_filters`), or their threshold.
    loss_scale : float, callable or GradScaler, optional
        What gradients are multiplied by, the same on all ranks: the number, a function that returns it, or an object
        with ``get_scale()``, asked once a step. What is kept of gradients follows it; without it, what was kept at one
        scale is added to gradients of another. Where an average is not finite, all ranks see that, and all that is kept
        is as before the step: leave the step out, as GradScaler does.
    invitation : str, optional
        By which this process comes in where a rank is gone (`Communicator.invitation`): the others let it in by `grow`,
        which it calls first. Plan, back end, its engine and ``on_failure`` are theirs, the other settings are to be
        given as they were to them.
    timeout : float
        Seconds that a rank waits for the others; where they agree on a plan, as long as one of them makes it.
    engine, exact
        Of the back end between GPUs, as `Communicator` takes them.
    on_failure : str
        What to do where a rank dies: "raise", or "shrink" to go on without it, where the back end can (`Communicator`).
        A bucket is then averaged over the ranks whose gradients were added up, also where in one step that are four in
        the first buckets and three in the others; on all ranks that are left the same bits. What the lost rank had kept
        of sparse gradients, low ranks or significance is lost, that of the others is used as ever. `recorder` and
        `collectives.report` say who was lost, and in which step and bucket. Not with SSP, ASP and Gossip.
    on_change : callable, optional
        Called with the numbers of ranks before and after when other ranks have taken part than before: at the end of
        the step, before its averages are returned, in the same step on all ranks, one that has just come too. Here a
        rate of learning is scaled.
    name : str
        Of the recorder.

    Attributes
    ----------
    communicator : Communicator
    recorder : Recorder
        What was exchanged, and the number of steps so far.
    buckets : tuple of Bucket

    Raises
    ------
    UsageError
        An argument does not fit, or ranks differ in parameters or settings; the plan is for another number of ranks.
    BackendError
        The ranks do not find each other.

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
        bucket_bytes: int = BUCKET_BYTES,
        density: Density | None = None,
        exchange: str = "auto",
        momentum: float = 0.0,
        wire: WireFormat | None = None,
        mode: Mode | str | None = None,
        low_rank: LowRank | int | None = None,
        codes: IntegerCodes | int | None = None,
        significance: Significance | float | None = None,
        loss_scale: GivenScale | None = None,
        timeout: float = 30.0,
        engine: str = "auto",
        exact: bool = True,
        on_failure: str = "raise",
        on_change: Callable[[int, int], object] | None = None,
        invitation: str | None = None,
        name: str = "gradients",
    ) -> None:
        self.mode = mode_of(mode)
        self._sparse = density is not None
        how = ExchangeSettings(
            density,
            exchange,
            momentum,
            wire,
            self.mode,
            low_rank=LowRank.of(low_rank),
            codes=IntegerCodes.of(codes),
            significance=Significance.of(significance),
        )
        scale = LossScale(loss_scale)
        self._comes = invitation is not None
        opened: Backend[Any] | None = None
        try:
            if invitation is None:
                opened, meant = open_backend_for_plan(
                    backend, plan, BackendSettings(timeout, engine=engine, exact=exact)
                )
                comm = Communicator(meant, opened, timeout=timeout, on_failure=on_failure)
            else:
                comm = Communicator.join(invitation, wait=timeout)
            self.communicator = comm
            self.recorder = register_recorder(Recorder(name, ranks=comm.size))
            self.recorder.among = self._among = comm.seats
            self._on_change, self._notes = on_change, 0
            with self._refusing("making the synchronizer"):
                self._shapes = GradientShapes(parameters, comm.ranks, comm.one_rank, comm.arrays)
                self.buckets = buckets_of(self._shapes.gradients, bucket_bytes=bucket_bytes)
                self._check_goes_on()
                memory = self._memory(how, self._shapes.lists(parameters, "parameter"))
            self._alike = f"{len(self._shapes)} parameters in {len(self.buckets)} buckets, {how}"
            if not self._comes:
                self._agree(self._alike)
            self._averager = make_averager(comm, how, self.recorder, timeout=timeout, loss_scale=scale)
            self._exchange = BucketExchange(comm, self._averager, memory, self._shapes.shapes)
            self._averaged = self._heard = 0
            self._there = (
                0  # the place of a rank of this process that had data in the last step in which one had
            )
            self._apart = False
            self._proximal: Proximal | None = None
            if isinstance(self.mode, LocalSGD) and self.mode.proximal:
                first = self._shapes.lists(parameters, "parameter")
                self._proximal = Proximal(self.mode.proximal, comm.arrays, first)
            log_start(comm, how)
        except BaseException:
            if opened is not None and opened is not backend:
                opened.close()
            elif self._comes and hasattr(self, "communicator"):
                self.communicator.close()
            raise

    def step(self, gradients: Any, *, out: Any = None) -> Any:
        """Average all gradients of a step.

        Parameters
        ----------
        gradients : list of arrays, one for each parameter; with several ranks in this process a list of such lists
        out : as ``gradients``, optional
            Where to put the averages: the gradients themselves, or arrays that share no memory with them. By default
            new arrays.

        Returns
        -------
        As ``gradients``.

        Raises
        ------
        UsageError
            A gradient is missing, or has another shape or dtype than its parameter. None is exchanged.
        RefusedError
            The same on all ranks, where each is a process: the arguments of one do not fit, or its density or loss
            scale raises. Buckets before the refused one have been exchanged; the others are not. What is kept of
            gradients is as before the step, and the next call makes the step anew.
        BackendError
            Another rank failed.
        """
        with self._refusing():
            self._check_heard()
            if self._exchange.given:
                raise UsageError("gradients of this step were given with ready already; end it with wait")
            listed = self._shapes.lists(self._present(gradients), "gradient")
            outs = None if out is None else self._shapes.lists(out, "out array")
        for index in reversed(range(len(self._shapes))):
            wanted = None if outs is None else [one[index] for one in outs]
            self._exchange.put(index, [one[index] for one in listed], wanted)
        return self._finished(outs)

    def ready(self, index: int, gradient: Any) -> None:
        """Give one gradient of a step as soon as it is known; buckets start when they are full.

        Until `wait` it must not be changed. Every gradient is given once, in any order; buckets start in theirs, so
        the reverse order of the parameters lets them start earliest.

        Parameters
        ----------
        index : int
            Of the parameter.
        gradient : array; with several ranks in this process a list of one for each

        Raises
        ------
        UsageError, RefusedError, BackendError
            As `step`. Where each rank is a process the step is then lost: give all its gradients again.
        """
        with self._refusing():
            self._check_heard()
            arrays = self._shapes.one(index, gradient, "gradient")
            if index in self._exchange.given:
                raise UsageError(f"gradient {index} was given already; give each once, then call wait")
        self._exchange.put(index, arrays, None)

    def wait(self, *, out: Any = None) -> Any:
        """End the step: the averages of the gradients that were given with `ready`; all as in `step`.

        Where ``out`` alone does not fit, no other rank waits for this one: the step goes on, and `wait` ends it when it
        is called again.
        """
        with self._refusing():
            missing = sorted(set(range(len(self._shapes))) - self._exchange.given)
            if missing:
                listed = ", ".join(map(str, missing[:8])) + ", …" * (len(missing) > 8)
                raise UsageError(
                    f"not given in this step: gradient {listed}; where there is none, give zeros"
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
        """A loop in which ranks have unequally many batches: ``with synchronizer.join(use=use): for batch in …``.

        A rank that leaves the block goes on giving zeros, and what it has kept, until all have left it. All ranks must
        enter it together. Where this process has several ranks, `step` takes None in place of the gradients of those
        that have no data any more.

        Parameters
        ----------
        use : callable, optional
            What the optimiser does with the averages of a step; it is called for the steps of the others, so that all
            ranks go through the same, and end with the same parameters and moments.
        parameters : as those that the synchronizer was made with, writeable, optional
            In place of ``use``: those of a rank that was there to the end are copied into them. Moments that an
            optimiser keeps are each rank's own then.
        divide_by : str
            "present" for the ranks that have data in a step, "all" for all of them, by which all samples have the same
            weight.

        Raises
        ------
        UsageError
            Neither ``use`` nor ``parameters`` is given, or both; the mode is another than `BSP`; gradients are whole
            numbers, which are not divided by the ranks present.
        BackendError
            Another rank failed, or has raised something inside.
        """
        comm = self.communicator
        with self._refusing("joining"):
            if comm.on_failure == "shrink" and (use is None or divide_by == "present"):
                raise UsageError(
                    "whether a rank that dies had data is not known to the others; with on_failure='shrink' join takes "
                    "use=... and divide_by='all'"
                )
            if (use is None) == (parameters is None):
                raise UsageError(
                    "ranks that have run out of data would be left with old parameters; give join either use=..., "
                    "what the optimiser does with averages, or parameters=..."
                )
            if not isinstance(self.mode, BSP):
                raise UsageError(
                    f"join is for steps that wait for all ranks, which those of {self.mode} do not"
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
            with self._refusing("leaving join"):
                self._check_between_steps()
            presence.here = 0
            last = True
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
        """Between steps: let in who comes in place of ranks that are gone, and give it what the others have.

        All ranks call it at the same steps, each time or every so many; it costs two meetings with short texts. One
        that was made with an ``invitation`` calls it first of all, and is then where the others are: in the same step,
        with their arrays. It has kept nothing of gradients; in `LocalSGD` its parameters are those of one of them.

        Parameters
        ----------
        arrays : list of arrays
            What steps change: parameters, moments. Those of a rank that comes are changed in place.

        Returns
        -------
        tuple of int
            The ranks that have come, as all are counted from now on.

        Raises
        ------
        UsageError
            A step is not over; or a rank that comes has other parameters, settings or arrays, and the others go on
            without it.
        BackendError
            Another rank failed.
        """
        comm = self.communicator
        with self._refusing("growing"):
            self._check_between_steps()
            if self._exchange.presence is not None:
                raise UsageError("who comes has not entered join; let others in outside of it")
            if comm.on_failure != "shrink" or not comm.one_rank:
                raise UsageError("ranks that raise when one dies let nobody in; use on_failure='shrink'")
        if not self._comes:
            comm.grow()  # who has come may have died again before some of the others return, so all of them meet
        with self._refusing("growing"):
            come = send_to_joining_ranks(
                comm,
                arrays,
                has_it=not self._comes,
                alike=f"{self._same()['layout']} {self._alike}",
                give=lambda: pack_arrays(self._common()),
                take=lambda text: self._take_common(unpack_arrays(text)),
            )
        self._comes = False
        return tuple(rank for rank, seat in enumerate(comm.seats) if seat in come)

    def after_step(self, parameters: Any) -> None:
        """Call it in every step when the optimiser has used the averages.

        With `LocalSGD` it averages the parameters when it is time, with `Gossip` it mixes them with a neighbour's; a
        next step without this call is a `UsageError`.

        Parameters
        ----------
        parameters : as those that the synchronizer was made with, writeable
            Changed in place; not touched in other modes.

        Raises
        ------
        BackendError
            Another rank failed.
        """
        self._heard = self.recorder.step
        if self._averaged < self._averager.due:
            self._averager.mix(self._by_parameter(parameters))
            self._tell_of_change()
            self._averaged, self._apart = self._averager.due, isinstance(self.mode, Gossip)
            if self._proximal is not None:
                self._proximal.averaged(self._shapes.lists(parameters, "parameter"))
        elif self._proximal is not None:
            self._proximal.moved(self._shapes.lists(parameters, "parameter"))

    def finish(
        self, parameters: Any = None, *, use: Callable[[list[Any]], object] | None = None
    ) -> list[Any] | None:
        """After the last step, before a test or a checkpoint: the same parameters on all ranks, bit for bit.

        With `SSP` and `ASP` what other ranks have sent late is used first; then, and with `LocalSGD` and `Gossip` too,
        the parameters are averaged. With `BSP` they are the same already. All ranks must call it. Training may go on
        afterwards.

        Parameters
        ----------
        parameters : as those that the synchronizer was made with, writeable
            Changed in place. Left out, nothing is averaged.
        use : callable, optional
            What the optimiser does with the averages of a step; for `SSP` and `ASP`.

        Returns
        -------
        list of arrays or None
            With `SSP` and `ASP` what came late, an array for each parameter, if ``use`` was not given: to be used like
            the averages of one more step, and like them times the loss scale.

        Raises
        ------
        UsageError
            With `LocalSGD` or `Gossip` the parameters are left out, or with `SSP` and `ASP` they are given without
            ``use``.
        BackendError
            Another rank failed, or does not finish within the timeout.
        """
        stale = isinstance(self.mode, SSP | ASP)
        if isinstance(self.mode, LOCAL_MODES) and parameters is None and self._apart:
            raise UsageError(
                f"each rank has parameters of its own after {self.mode}; give them: finish(parameters)"
            )
        if stale and parameters is not None and use is None:
            raise UsageError(
                f"what came late in {self.mode} is to be used before parameters are averaged; give "
                "finish(parameters, use=...) what the optimiser does with averages"
            )
        rest = None
        if stale:
            left, scale = self._averager.finish(), self._averager.loss_scale()
            rest = self._exchange.rest({key: one if scale == 1 else one * scale for key, one in left.items()})
            if use is not None:
                use(rest)
            if parameters is None:
                # nobody goes on before all have what came late: a gradient of the next step would be taken for one
                self.communicator.all_reduce(max(rest, key=lambda one: one.size).reshape(-1)[:1] + 0)
        if parameters is not None and not isinstance(self.mode, BSP):
            self._average(parameters)
        return rest if use is None else None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this process must hold: the steps so far, and what was not sent yet, as copies.

        Also what filters of gradients (``low_rank``, ``significance``) keep. Each process saves its own.

        Raises
        ------
        UsageError
            A step is not over.
        """
        self._check_between_steps()
        pulled = {} if self._proximal is None else {"proximal": self._proximal.state()}
        return {
            **self._same(),
            "held": list(self.communicator.ranks),
            "step": self.recorder.step,
            "residuals": self.communicator.sparse_state(),
            "filters": self._averager.filter_state(),
            **pulled,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on the same rank, bit for bit; all ranks must call it.

        A state of another number of ranks gives the step alone, and one of other settings what fits them: one warning
        says what is lost, with counts. What an earlier release saved (format 1) is taken for that of gradients with the
        loss scale of now: restore the scaler first.

        Raises
        ------
        UsageError
            On some rank it is of other parameters, other buckets or another rank: on all, and nothing has changed. Or
            this rank has come later and has yet to call `grow`.
        BackendError
            Another rank failed, or does not call it.
        """
        if self._comes:
            raise UsageError("this rank gets what the others have; call grow in place of load_state_dict")
        check_on_all(self.communicator.gather_texts, lambda: self._check_state(state))
        same = self._same()
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
            warn_of_unused_state(
                lost, f"the state is of {state['ranks']} ranks, and this job has {same['ranks']}"
            )
        else:
            self.communicator.restore_sparse_state(state["residuals"] if self._sparse else {})
            lost = [self._averager.restore_filter(filters)]
            if not self._sparse:
                lost.append(describe_state({"residuals": residuals}, of="bucket"))
            warn_of_unused_state(lost, "gradients travel by other settings than when the state was saved")
            if self._proximal is not None:
                self._proximal.restore(state["proximal"])
        self.recorder.step = self._heard = int(state["step"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `UsageError` where a state does not fit."""
        self._check_between_steps()
        same, ranks = self._same(), self.communicator.ranks
        for key in ("format", "layout"):
            if state.get(key) != same[key] and (key, state.get(key)) != ("format", EARLIER):
                found, wanted = str(state.get(key))[:60], str(same[key])[:60]
                raise UsageError(
                    f"the state was saved with {key} {found}, and here it is {wanted}; restore it with the same "
                    "parameters and bucket_bytes"
                )
        if self._proximal is not None and "proximal" not in state:
            raise UsageError(
                f"the state was saved in another mode than {self.mode}, and says nothing of where parameters were last "
                "averaged; restore it with the same mode"
            )
        if state["ranks"] == same["ranks"] and tuple(state.get("held", ranks)) != tuple(ranks):
            raise UsageError(
                f"the state is that of ranks {list(state['held'])}, and this process has {list(ranks)}; every process "
                "loads what it saved itself"
            )

    def close(self) -> None:
        """Leave the job; closing twice is fine."""
        self._averager.close()
        self.communicator.close()

    def __enter__(self) -> GradientSynchronizer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _same(self) -> dict[str, Any]:
        """What all ranks must share, and a state too."""
        told = repr((self._shapes.shapes, self.buckets))
        layout = hashlib.sha256(told.encode()).hexdigest()[:16]
        return {"format": FORMAT, "ranks": self.communicator.size, "layout": layout}

    def _agree(self, mine: str) -> None:
        """Compare shapes, buckets and settings with all ranks; ``mine`` tells of them."""
        layout = self._same()["layout"]
        told = self.communicator.gather_texts(f"{layout} {mine}")
        for rank, one in enumerate(told):
            if one != told[0]:
                theirs, first = (text.partition(" ")[2] for text in (one, told[0]))
                raise UsageError(
                    f"rank {rank} has other parameters or settings than rank 0: {theirs}, and there {first}; "
                    "make the synchronizer alike on all ranks"
                )

    def _memory(self, how: ExchangeSettings, parameters: list[list[Any]]) -> list[BucketMemory]:
        """Of all buckets, and for sparse gradients the plans too: what does not fit shows now."""
        comm, shapes = self.communicator, self._shapes.shapes
        memory = []
        for bucket in self.buckets:
            likes = [one[bucket.members[0]] for one in parameters]
            memory.append(BucketMemory(bucket, shapes, comm, likes))
            if how.density is not None and not self._comes:
                lines = memory[-1].given or [comm.arrays.reals(comm.arrays.line(one)) for one in likes]
                comm.explain(
                    lines[0] if comm.one_rank else lines,
                    density=how.density_at(0),
                    exchange=how.exchange,
                    wire=how.wire,
                )
        return memory

    def _finished(self, outs: list[list[Any]] | None) -> Any:
        scale = 1.0 if self._proximal is None else self._averager.scale
        averages = self._exchange.finish(outs)
        self._tell_of_change()
        if self._proximal is not None:
            self._proximal.add_to(averages, scale=scale)
        return averages[0] if self.communicator.one_rank else averages

    def _check_goes_on(self) -> None:
        """Raise `UsageError` where gradients are exchanged in a way that cannot go on without a rank."""
        comm = self.communicator
        if comm.on_failure != "shrink":
            return
        if not comm.one_rank:
            raise UsageError(
                f"the {comm.backend} back end has all ranks in this process, which live and die together; leave "
                "on_failure='shrink' out"
            )
        if not isinstance(self.mode, BSP | LocalSGD):
            raise UsageError(
                f"ranks of {self.mode} send to each other one by one and cannot go on without one; use bsp or local "
                "with on_failure='shrink'"
            )

    def _common(self) -> dict[str, np.ndarray[Any, Any]]:
        """What all ranks have alike besides the caller's arrays."""
        numbers = [self.recorder.step, self._averaged, self._heard, self._averager.due, self._apart]
        pulled = {} if self._proximal is None else self._proximal.common()
        kept = {f"kept {name}": one for name, one in self._averager.common().items()}
        return {"numbers": np.array(numbers), "among": np.array(self._among), **pulled, **kept}

    def _take_common(self, state: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Go on from what `_common` gave on another rank."""
        step, self._averaged, self._heard, self._averager.due, apart = map(int, state["numbers"])
        self.recorder.step, self._apart = step, bool(apart)
        self._among = self.recorder.among = tuple(map(int, state["among"]))
        if self._proximal is not None:
            self._proximal.restore_common(state)
        kept = {name[5:]: one for name, one in state.items() if name.startswith("kept ")}
        self._averager.restore_common(kept)

    def _tell_of_change(self) -> None:
        """At the end of what all ranks exchange alike: whether others took part in it than before."""
        before, self._among = self._among, self.recorder.among
        if before == self._among:
            return
        notes = self.communicator.notes
        self.recorder.explain_changes(self._averager.norm_kept(), notes[self._notes :])
        self._notes = len(notes)
        if self._on_change is not None:
            self._on_change(len(before), len(self._among))

    @contextlib.contextmanager
    def _refusing(self, when: str = "") -> Iterator[None]:
        """Arguments that do not fit are told to the other ranks, which would wait for this one and lose the step."""
        try:
            yield
        except RefusedError:  # by all ranks
            self._give_up()
            raise
        except UsageError as error:
            text = f"{when or f'training step {self.recorder.step}'}: {error}"
            try:
                self.communicator.refuse(text)
            except RefusedError as told:
                raise told from error
            except BackendError:
                pass  # the others are gone, and this rank has an error of its own
            finally:
                self._give_up()
            raise UsageError(text) from error

    def _give_up(self) -> None:
        """Lose the step that has begun, as the other ranks do; one process with all ranks goes on with it."""
        if hasattr(self, "_exchange") and self.communicator.one_rank:
            self._exchange.give_up()

    def _average(self, parameters: Any) -> None:
        """Average the parameters now."""
        average_parameters(self.communicator, self.recorder, self._by_parameter(parameters))
        self._tell_of_change()
        self._heard = self.recorder.step
        self._averaged = self._averager.due
        self._apart = False
        if self._proximal is not None:
            self._proximal.averaged(self._shapes.lists(parameters, "parameter"))

    def _by_parameter(self, parameters: Any) -> list[Any]:
        """What the caller gives, as `average_parameters` takes it."""
        listed = self._shapes.lists(parameters, "parameter")
        return listed[0] if self.communicator.one_rank else list(zip(*listed, strict=True))

    def _present(self, gradients: Any) -> Any:
        """Inside `join`, zeros in place of what ranks of this process do not give any more."""
        presence, comm = self._exchange.presence, self.communicator
        if presence is None or comm.one_rank or not isinstance(gradients, list | tuple):
            return gradients
        there = [place for place, one in enumerate(gradients) if one is not None]
        presence.here = len(there)
        self._there = there[0] if there else self._there
        return [self._zeros() if one is None else one for one in gradients]

    def _zeros(self) -> list[Any]:
        """Gradients of a rank that has no data."""
        library = self.communicator.arrays
        return [
            library.of(np.zeros(shape), dtype)
            for shape, dtype in zip(self._shapes.shapes, self._shapes.dtypes, strict=True)
        ]

    def _total(self, here: int) -> int:
        """Of how many ranks of this process have data: how many of all do."""
        return int(self._over_all(here, "sum"))

    def _over_all(self, number: int, op: str) -> int:
        """A number of this process's first rank, reduced with those of other processes; zeros of its others."""
        comm, library = self.communicator, self.communicator.arrays
        lines = [library.wrapped(np.array([number * (not place)])) for place in range(len(comm.ranks))]
        given = lines[0] if comm.one_rank else lines
        comm.all_reduce(given, op=op, out=given)
        return int(library.values(lines[0])[0])

    def _copy_from_last(self, weights: list[list[Any]], last: bool) -> None:
        """Give all ranks the parameters of one that had data to the end."""
        comm = self.communicator
        root = self._over_all(comm.ranks[self._there] if last else 0, "max")
        for one in zip(*weights, strict=True):
            given = one[0] if comm.one_rank else list(one)
            comm.broadcast(given, root=root, out=given)

    def _check_heard(self) -> None:
        """Whether `grow` and `after_step` were called before, where they have something to do."""
        if self._comes:
            raise UsageError("this rank has come in later and has not what the others have; call grow first")
        if isinstance(self.mode, LOCAL_MODES) and self._heard != self.recorder.step:
            raise UsageError(
                f"{self.mode} averages parameters when it is told that they have "
                "moved, and it was not told in the step before; call after_step(parameters) in every step"
            )
        self._apart = True

    def _check_between_steps(self) -> None:
        if self._exchange.given:
            raise UsageError("the step is not over; call wait first")
