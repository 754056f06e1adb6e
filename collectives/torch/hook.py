"""Average buckets of gradients by a plan: the communication hook of DistributedDataParallel.

Its state holds the plan, the settings of the exchange, and the residuals of sparse gradients.
"""

# annotations must not be strings here: DDP compares those of the hook with its own types

import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from numbers import Real
from types import FrameType, FunctionType
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from collectives.backends.torch.backend_selection import backend_of
from collectives.backends.torch.process_groups import existing_group, own_group, wait_for_gloo_threads
from collectives.communicator.communicator import Communicator
from collectives.communicator.job_plan import PlanLike
from collectives.peers.agreement import check_on_all
from collectives.recovery.survivors import can_recover
from collectives.sparse.residuals import finite_residual
from collectives.torch.bucket_exchange import BuiltInBucketExchange, DdpBucketExchange, give_unused_rows
from collectives.torch.joining import restore_state, saved_state, state_signature
from collectives.torch.mode_exchange import ModeExchange
from collectives.torch.parameter_residuals import (
    ParameterNumbers,
    ParameterResidual,
    named_tensors_of,
    tensors_of,
)
from collectives.torch.plan_agreement import PlanAgreement, agreed_plan, agreed_settings, gather_by
from collectives.torch.process_group import ProcessGroupTopoplan
from collectives.torch.recovery import (
    LostResiduals,
    OriginalRanks,
    RecoveringExchange,
    Shrunk,
    check_recoverable,
    warn_of_launcher,
)
from collectives.training.averaging import InStepAverager, make_averager
from collectives.training.buckets import DataPresence, share_failure
from collectives.training.checkpoint_state import (
    EMPTY_STATE,
    OUTER_STATE,
    check_list_of_states,
    check_states,
    describe_state,
    listed_states,
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
from collectives.training.modes import BSP, Gossip, LocalSGD, Mode, OuterMode, mode_of
from collectives.training.outer_optimizers import check_rounds_in_flight
from collectives.training.report import Recorder, log_compilation, log_start, register_recorder
from topoplan.errors import BackendError, UsageError
from topoplan.units import check_type

FORMAT = "topoplan.hook/2"
"""Format of a checkpoint state: residuals are in units of a loss scale of 1; earlier states name no format."""


_GROUPS = ("compression", "sync", "fault_tolerance")


class HookState:
    """State of `topoplan_hook`: ``model.register_comm_hook(HookState(plan), topoplan_hook)``.

    All ranks of the group make one, with the same arguments. If no plan can be made for the job, or the group's library
    cannot carry one, all of them warn once with the reason and use torch's own allreduce of dense gradients, in step.
    Every method raises `BackendError` if another rank fails, or does not make the same call within the timeout.

    Parameters
    ----------
    plan : Plan, SizePlans, str, path or Topology, optional
        A plan for as many ranks as the group has, or its file; or the machine whose GPUs these ranks are, also by its
        name in the library. By default made for the hosts and GPUs of the job.
    compression : TopK, CommonRows, LowRank, Quantize, Threshold or Cast, optional
        Compression of the gradients (docs/compression.md compares the methods); by default none.
        The residual of `TopK` is float32 for gradients of 16 bits, which are sent in float32. On GPUs `TopK` stays
        there, which needs CuPy (``topoplan[cuda12]`` or ``topoplan[cuda13]``, as torch is built); without it gradients
        go through the host, and a warning says so. `CommonRows`, `LowRank`, `Quantize` and `Threshold` compute on the
        CPU.
    sync : BSP, SSP, ASP, LocalSGD, DiLoCo, SparseLoCo or str, optional
        How asynchronous ranks may be (`collectives.training.modes`), also by name, as "ssp:2"; BSP by default. SSP and
        ASP begin with the third step, when DDP has arranged its buckets. In these modes only `Cast` may be given, and
        it rounds only the buckets that all ranks add: the first two steps of SSP and ASP.
    fault_tolerance : Shrink, optional
        Repeat the step of a failed rank among the survivors (`collectives.torch.recovery`): with BSP, and with
        gradients on the CPU; by default a failed rank is an error. Averages are then divided by the number of
        survivors. Call `register` with the model, and `finish` in the end. It costs a copy of the gradients, one of
        the residuals, and an agreement of the ranks in each step. With a join token this process joins in place of a
        failed rank, while the others call `grow`, for which it waits; plan and back end are those of the others.
    loss_scale : GradScaler, float or callable, optional
        Factor of the loss, the same on all ranks: an object with ``get_scale()`` as ``torch.amp.GradScaler``, the
        number, or a function that returns it; asked once a step. Residuals then follow it, late gradients of `SSP` and
        `ASP` travel without it, and the pull of a proximal `LocalSGD` is multiplied by it. Without it, residuals of
        one scale are added to gradients of another. If an average is not finite, all ranks see that, and residuals are
        as before the step, which GradScaler skips on all ranks.
    parameters : iterable of Parameter, or of pairs of a name and a Parameter, optional
        The model's, in the order by which a checkpoint numbers them. By default they are numbered as the first step
        brings them: the same for the same model and ``bucket_cap_mb``. Pairs, as of ``model.named_parameters()``, have
        the names for `TopK` with densities by name.
    group : ProcessGroup, optional
        The default group if it is left out; a gloo group for tensors on the CPU, an NCCL group for those on GPUs. With
        an NCCL group, gradients are exchanged over a new group of the same ranks, so that DDP and the model
        (SyncBatchNorm, for one) may use theirs meanwhile: calls of two threads on one NCCL communicator would have no
        fixed order. `close` destroys it. A group of fewer ranks than the job's must be in as many groups on each of
        them.
    timeout : float
        Seconds that a rank waits for the next message of a peer.
    shared : bool
        Whether gradients on the CPU go through shared memory if all ranks run on one host, and by own links between
        hosts that can connect; if not, by messages of the group. Those are slower than gloo's own all_reduce: gloo
        copies each chunk into a message, which Python starts and waits for.
    engine, exact
        For gradients on GPUs, as in `Communicator`: kernels that write to the other GPUs' memory if all ranks have them
        (which needs CuPy and nccl4py beside torch), else messages of the group.
    **deprecated
        Keywords of earlier versions: density, exchange, momentum, wire (`TopK`), low_rank, codes (`Quantize`),
        significance (`Threshold`), compress (`Cast`), mode (``sync``), on_failure, on_change, invitation (`Shrink`).

    Attributes
    ----------
    rank, size : int
        This process's rank, and the number of ranks, as they are now.
    shrunk : tuple of Shrunk
        Steps after which there were fewer ranks, and the residuals of the failed ones.
    communicator : Communicator or None
        None if torch's own allreduce is used.
    reason : str
        Why it is used; else empty.
    recorder : Recorder
        Records exchanges and their times.
    loss_scale : GradScaler, float, callable or None
        As given. It may be set between steps.

    Raises
    ------
    UsageError
        torch.distributed is not initialised, an argument is out of range or differs between ranks, or the plan of a
        rank is invalid, for another number of ranks or not that of the others; on all ranks, with the same text.
    BackendError
        The rendezvous of the ranks failed.

    Notes
    -----
    A run that is restored from a checkpoint continues bit for bit if DDP has the same options. DDP begins with its
    first buckets again and arranges them in its second step; the hook exchanges the first step in the buckets of the
    saved run, after backward. A checkpoint of the first step of all does not know them yet, unless DDP keeps its
    buckets (``find_unused_parameters=True``). A parameter whose gradient is zero throughout on a rank sends nothing
    from there in this step.

    A copy (`copy.deepcopy`, `pickle`, `torch.save`, also inside a copied model) carries the arguments and the result of
    `state_dict`, but no connection: ``communicator`` is None until it connects to the other ranks in its first step or
    in `register`, `join`, `grow` or `load_state_dict`, in which all ranks must have a copy. DDP does not register the
    hooks of a model with its copy: a copy that is to be trained needs a new registration. A state with ``group`` can be
    copied in its process, and not pickled. A ``loss_scale`` that is neither a number nor a function is not pickled,
    since another GradScaler would result: set ``state.loss_scale = scaler`` before the first step of a loaded state.

    One state counts the steps of one model: it is refused with a second one.
    """

    def __init__(
        self,
        plan: PlanLike | None = None,
        *,
        compression: Compression | None = None,
        sync: Mode | str | None = None,
        fault_tolerance: Shrink | None = None,
        loss_scale: GivenScale | None = None,
        parameters: Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: float = 30.0,
        shared: bool = True,
        engine: str = "auto",
        exact: bool = True,
        **deprecated: Unpack[DeprecatedOptions],
    ) -> None:
        warn_of_deprecated("HookState", deprecated, quiet=dist.is_initialized() and dist.get_rank() > 0)
        given = {name: value for name, value in locals().items() if name not in ("self", "deprecated")}
        listed, names = (None, None) if parameters is None else named_tensors_of(parameters)
        pairs = listed if listed is None or names is None else list(zip(names, listed, strict=True))
        self._arguments: dict[str, Any] = {**given, "parameters": pairs}
        if group is not None and dist.is_initialized() and group is dist.group.WORLD:
            self._arguments["group"] = None  # of any process
        self._copied: dict[str, Any] | None = None
        """State of a copy that has not connected to the other ranks yet, from `state_dict`."""
        self._seen_parameters: tuple[set[int], bool] = (set(), False)
        self._without_scale = False
        shrink: Shrink | None = None

        def settings() -> ExchangeSettings:
            nonlocal shrink
            refuse_compression_as_plan(plan, "HookState({})")
            how, mode, shrink = current_options(
                deprecated, compression=compression, sync=sync, fault_tolerance=fault_tolerance
            )
            self._arguments |= {"compression": how, "sync": mode, "fault_tolerance": shrink}
            made = ExchangeSettings(how, mode_of(mode, "sync"), shrinks=shrink is not None, names=names)
            if made.top_k is not None and isinstance(made.top_k.density, dict):
                if names is None:
                    raise UsageError(
                        "densities by name need names; give HookState(parameters=model.named_parameters())"
                    )
                made.top_k.check_names(names)
            if shrink is not None and not isinstance(made.mode, BSP):
                raise UsageError(
                    f"fault_tolerance=Shrink() needs steps that wait for all ranks, got sync "
                    f"{made.mode}; leave sync out"
                )
            if isinstance(made.mode, Gossip):
                raise UsageError(
                    "Gossip needs loops that call after_step, which those of DDP do not; use "
                    "collectives.GradientSynchronizer"
                )
            LossScale(loss_scale)
            return made

        numbers = ParameterNumbers(listed)
        if not dist.is_initialized():
            settings()  # no other rank waits yet
        self.group = existing_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        gather = gather_by(self.group)
        asked = fault_tolerance.join_token if isinstance(fault_tolerance, Shrink) else None
        join_token = asked or deprecated.get("invitation")
        alone = join_token is not None
        if alone and (plan is not None or self.size > 1):
            raise UsageError(
                "a rank with a join token takes the plan of the others; give no plan, and a process group of this rank "
                "alone"
            )
        how = settings() if alone else agreed_settings(settings, gather)
        self._changed = alone
        self.mode, scale = how.mode, LossScale(loss_scale)
        self._loss_scale = scale
        self.recorder = register_recorder(Recorder("hook", ranks=self.size))
        verdict = PlanAgreement(None) if alone else agreed_plan(plan, self.group, gather)
        self.reason = verdict.reason
        self.communicator: Communicator | None = None
        self.momentum = 0.0 if how.top_k is None else how.top_k.momentum
        self._ef21 = None if how.top_k is None else how.top_k.ef21
        self.shrunk: tuple[Shrunk, ...] = ()
        self._on_change = None if shrink is None else shrink.on_change
        self._registered = shrink is None
        self._model: Callable[[], DistributedDataParallel | None] = lambda: None
        self._own: dist.ProcessGroup | None = None
        self.buckets: DdpBucketExchange | BuiltInBucketExchange | ModeExchange
        if join_token is not None:
            self.communicator = comm = Communicator.join(join_token, wait=timeout)
            with ExitStack() as on_error:
                on_error.callback(comm.close)
                self.rank, self.size, self.recorder.among = comm.rank, comm.size, comm.original_ranks
                within = InStepAverager(comm, how, self.recorder, scale)
                self.buckets = RecoveringExchange(within, numbers, self._report_change, has_it=False)
                log_start(comm, how)
                on_error.pop_all()
            return
        if verdict.plan is None:
            if shrink is not None:
                raise UsageError(
                    f"fault_tolerance=Shrink() needs gradients by plan, and no plan fits: {self.reason}"
                )
            warnings.warn(
                f"dense gradients are averaged by torch's own allreduce: {self.reason}", stacklevel=2
            )
            self.buckets = BuiltInBucketExchange(self.group, self.recorder)
            return
        self._own = own_group(self.group, timeout=timeout)
        with ExitStack() as on_error:
            on_error.callback(self._leave)
            backend = backend_of(
                self._own or self.group, gather, timeout=timeout, shared=shared, engine=engine, exact=exact
            )
            on_error.callback(backend.close)
            self.communicator = comm = Communicator(verdict.plan, backend, timeout=timeout)
            within = InStepAverager(comm, how, self.recorder, scale)
            in_step = DdpBucketExchange(within, numbers)
            if shrink is not None:
                if not can_recover(backend):
                    raise UsageError(
                        "fault_tolerance=Shrink() needs gradients on the CPU, among ranks that can connect, got "
                        f"the {backend.name} back end"
                    )
                warn_of_launcher(self.rank)
                self.recorder.among = comm.original_ranks
                in_step = RecoveringExchange(within, numbers, self._report_change)
            self.buckets = in_step
            if not isinstance(self.mode, BSP):
                self.buckets = ModeExchange(
                    make_averager(comm, how, self.recorder, timeout=timeout, loss_scale=scale), in_step, comm
                )
            log_start(comm, how)
            log_compilation(self.recorder, comm)
            on_error.pop_all()

    @property
    def loss_scale(self) -> GivenScale | None:
        """Factor of the loss, as given; a new value holds from the next step on."""
        given: GivenScale | None = self._arguments["loss_scale"]
        return given

    @loss_scale.setter
    def loss_scale(self, given: GivenScale | None) -> None:
        self._loss_scale.use(given)
        self._arguments["loss_scale"], self._without_scale = given, False

    def register(self, model: DistributedDataParallel) -> None:
        """Register the hook with a model; needed in place of ``register_comm_hook`` with `Shrink`.

        Sparse embeddings (``nn.Embedding(sparse=True)``) that a step does not use get a gradient without rows if DDP
        looks for unused parameters; torch itself ends such a backward with "Expected sparse gradient to be defined".

        Calls of DDP itself on its process group in every step, for buffers and unused parameters, would fail with a
        rank. A model with such calls is refused, unless the group recovers too ("topoplan" with
        TOPOPLAN_ON_FAILURE=shrink). Buckets are arranged in the second forward pass, which over other groups asks all
        ranks once more.

        Raises
        ------
        UsageError
            model is not a DistributedDataParallel, or uses its group in each step; or this state is registered already.
        """
        self._connect()
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"model must be a DistributedDataParallel, got a {type(model).__name__}; give register the wrapped "
                "model"
            )
        if isinstance(self.buckets, RecoveringExchange):
            check_recoverable(model)
        if (found := self._model()) is not None:
            which = "with this model" if found is model else "with another model, whose steps it counts"
            raise UsageError(f"this HookState is registered {which}; make a HookState for each model, once")
        model.register_comm_hook(self, topoplan_hook)
        self._registered, self._model = True, weakref.ref(model)
        give_unused_rows(model)

    def grow(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """Let joining ranks take the places of failed ones between steps, and send them the state of the others.

        All ranks call it at the same steps, each time or every so many; it costs them agreements of short texts. A rank
        made with a join token calls it first, and then has the model, buffers too, the state of the optimizer, and
        the step (``recorder.step``) of the others, without residuals.

        A joining rank has a process group of its own, ``init_process_group("gloo", store=HashStore(), rank=0,
        world_size=1)``, for its DDP, which must arrange its buckets as the others have: it goes forward and backward
        once, with any inputs, before `register`. All ranks give their ``parameters``.

        Returns the ranks that joined, by their numbers from now on.

        Raises
        ------
        UsageError
            `Shrink` or ``parameters`` is missing; the group survives failures too (`collectives.torch.grow`); or this
            rank has joined with another model or settings.
        """
        check_type("model", model, DistributedDataParallel, remedy="give the wrapped model")
        self._connect()
        buckets, module = self.buckets, model.module
        if not isinstance(buckets, RecoveringExchange):
            raise UsageError("grow() needs fault_tolerance=Shrink(); give it to HookState")
        planned = ProcessGroupTopoplan.of(self.group)
        if planned is not None and planned.goes_on:
            raise UsageError(
                "state.grow() lets no rank into the process group topoplan; leave the hook out and use "
                "collectives.torch.grow, or init_process_group('gloo') with the hook"
            )

        def give() -> bytes:
            common = {name: torch.from_numpy(one) for name, one in buckets.averager.common().items()}
            return saved_state([module, optimizer], common=common, step=self.recorder.step)

        def take(data: bytes) -> None:
            found = restore_state([module, optimizer], data)
            self.recorder.step = found["step"]
            buckets.averager.restore_common({name: one.numpy() for name, one in found["common"].items()})

        return buckets.grow(f"{state_signature([module])}, {buckets.averager.settings}", give, take)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's step and residuals, by the numbers of the parameters; each rank saves its own.

        The state of `CommonRows`, `LowRank` and `Threshold` is included. All values are numbers, texts and tensors on
        the CPU, as `torch.save` takes them.
        """
        if self._copied is not None:
            return deepcopy(self._copied)
        in_step = self.buckets if isinstance(self.buckets, DdpBucketExchange) else None
        kept = {} if in_step is None else in_step.residuals.by_parameter()
        filters = EMPTY_STATE if in_step is None else in_step.averager.filter_state()
        found = self.buckets.outer_state() if isinstance(self.buckets, ModeExchange) else None
        outer: dict[str, Any] = {} if found is None else {"outer": found}
        if isinstance(self.buckets, ModeExchange) and isinstance(self.mode, LocalSGD):
            outer["anchors"] = self.buckets.anchors()
        return {
            "format": FORMAT,
            "rank": self.rank,
            "ranks": self.size,
            "step": self.recorder.step,
            "momentum": self.momentum,
            **outer,
            "arrivals": None if in_step is None else in_step.arrivals,
            "buckets": None if in_step is None else in_step.bucket_numbers,
            "residuals": {number: one.residual for number, one in kept.items()},
            "velocities": {number: one.velocity for number, one in kept.items() if one.velocity is not None},
            "filters": {
                "filter": filters["filter"],
                **{
                    which: {
                        name: [torch.from_numpy(one) for one in held] for name, held in filters[which].items()
                    }
                    for which in ("residuals", "arrays")
                },
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state_dict` returned on this rank; all ranks must call it.

        A state of another number of ranks restores the step alone, and one of other settings what still applies: one
        warning lists what is lost, with counts. A state without a format is taken in units of the present loss scale:
        restore the scaler first. If DDP's buckets differ from those of the saved state, a later warning of the first
        steps lists lost state of buckets, and without ``parameters`` all state that is identified by numbers.

        `DiLoCo` and `SparseLoCo` restore the start of a round and the momentum from a state of any number of ranks.
        Each rank then gets the mean residual of `SparseLoCo`; a rank may give a list of states, so that all saved ranks
        are given by some rank.

        Raises
        ------
        UsageError
            On some rank the state is of another rank or another momentum: raised on all, and nothing has changed. Or
            this rank has joined and has not called `grow`.
        """
        self._connect()
        if isinstance(self.buckets, RecoveringExchange):
            self.buckets.check_has_it()
        comm = self.communicator
        gather = gather_by(self.group) if comm is None else comm._gather_texts
        states = listed_states(state)
        check_on_all(gather, lambda: self._check_states(states))
        state = states[0]
        if "format" not in state:
            state = unscaled_state(state, self._loss_scale())
        velocities, filters = state["velocities"], state.get("filters", EMPTY_STATE)
        kept = {
            int(number): ParameterResidual(
                _finite_residual(residual),
                _finite_residual(velocities[number]) if number in velocities else None,
            ).copy()
            for number, residual in state["residuals"].items()
        }
        in_step = self.buckets if isinstance(self.buckets, DdpBucketExchange) else None
        sparse = in_step is not None and in_step.averager.settings.top_k is not None
        unsent = describe_state({"residuals": {number: [one.residual] for number, one in kept.items()}})
        if state["ranks"] != self.size:
            why = f"the state is of {state['ranks']} ranks, and this job has {self.size}"
            lost, kept, filters = [unsent, describe_state(filters)], {}, EMPTY_STATE
        else:
            why = "gradients travel by other settings than when the state was saved"
            lost = ["" if sparse else unsent]
        if in_step is not None:
            in_step.residuals.replace(kept if sparse else {})
            lost.append(in_step.averager.restore_filter(filters))
            if "arrivals" in state:
                in_step.restored(state["arrivals"])
            buckets = state.get("buckets") if state["ranks"] == self.size else None
            same = len(set(gather(json.dumps(buckets)))) == 1
            in_step.continue_buckets(buckets if same else None)
            if isinstance(in_step, RecoveringExchange):
                in_step.forget()
        else:
            lost.append(describe_state(filters))
        if isinstance(self.buckets, ModeExchange) and isinstance(self.mode, OuterMode):
            saved = None if state["ranks"] == self.size else state["ranks"]
            lost.append(self.buckets.restore_outer([(one["rank"], one["outer"]) for one in states], saved))
        elif "outer" in state:
            lost.append(OUTER_STATE)
        anchors = state.get("anchors", {})
        if isinstance(self.buckets, ModeExchange):
            fits = state["ranks"] == self.size and isinstance(self.mode, LocalSGD) and self.mode.proximal
            self.buckets.restore_anchors(anchors if fits else {})
            if anchors and not fits:
                lost.append("the anchors of parameters")
        self.recorder.step = int(state["step"])
        warn_of_unused_state(lost, why)

    def _check_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        check_states(states)
        for one in states:
            self._check_state(one)
        check_list_of_states([one["ranks"] for one in states], self.size)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if state["ranks"] == self.size and state["rank"] != self.rank:
            raise UsageError(
                f"the state is that of rank {state['rank']} of {state['ranks']}, and this is rank {self.rank} of "
                f"{self.size}; every rank loads what it saved itself"
            )
        if isinstance(self.mode, OuterMode) and self.communicator is not None and "outer" not in state:
            raise UsageError(
                f"the state was saved in another mode than {self.mode}, without the start of a round; restore it with "
                "the same mode"
            )
        if isinstance(self.mode, OuterMode) and "outer" in state:
            check_rounds_in_flight(state["outer"], self.mode)
        if state["ranks"] == self.size:
            filters = state.get("filters", EMPTY_STATE)
            check_saved_estimates(filters, self._ef21, residuals=bool(state["residuals"]))
        if state["momentum"] != self.momentum:
            raise UsageError(
                f"the state must be of momentum {self.momentum}, got {state['momentum']}; use the same"
            )

    def after_step(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average moved parameters if the mode is due; for parameters that no optimizer of `torch.optim` moves.

        Call it in every step after they have moved. With `LocalSGD` it averages them if that is due. After
        ``optimizer.step()`` it has nothing to do.

        Raises
        ------
        UsageError
            These are not parameters.
        """
        try:
            listed = tensors_of(parameters)
        except Exception as error:
            if (
                self.communicator is not None
                and isinstance(self.buckets, ModeExchange)
                and self.buckets.meets
            ):
                self.communicator._refuse_for(error)
            raise
        if self._copied is None and isinstance(self.buckets, ModeExchange):
            self.buckets.after_step(listed)

    def finish(self, step: Callable[[], object] | None = None) -> None:
        """Give all ranks the same parameters, bit for bit: call it after the last step, before a test or a checkpoint.

        `SSP` and `ASP` use late gradients first, in one more step of the optimizers and without a loss scale; then, and
        with `LocalSGD`, `DiLoCo` and `SparseLoCo` too, the parameters are averaged. With `BSP` they are the same
        already; with `Shrink` they are so when no survivor has more steps than another one. All ranks must call it.
        Training may continue afterwards.

        Buffers of the model that differ, such as those of BatchNorm, become the same on all ranks too, except with
        `BSP`, for which DDP treats them as without the hook: floating-point and complex ones (``running_mean``,
        ``running_var``) are averaged, integers and truth values (``num_batches_tracked``) become the maximum.

        Parameters
        ----------
        step : callable, optional
            Moves the parameters by their gradients, for `SSP` and `ASP` without an optimizer of `torch.optim`.

        Raises
        ------
        UsageError
            No optimizer has moved the parameters, and ``step`` is not given.
        """
        if self._copied is not None:
            return  # a copy without a step
        if isinstance(self.buckets, ModeExchange):
            self.buckets.finish(step)
        elif isinstance(self.buckets, RecoveringExchange):
            self.buckets.settle()

    @contextmanager
    def join(self, model: DistributedDataParallel, *, divide_by: str = "present") -> Iterator[None]:
        """Context of a loop in which ranks have unequal numbers of batches: ``with state.join(model): for batch in …``.

        It replaces ``model.join()``, which it enters: a rank that leaves the block gives zeros and its residuals until
        all have left it; then all get the parameters of one that had data to the end. All ranks must enter it together.
        Moments of optimizers are each rank's own.

        ``model.join()`` alone would run the hook as well, without the number of ranks that have data: by the hook it
        divides by all ranks, and ``divide_by_initial_world_size=False`` is refused there.

        Parameters
        ----------
        divide_by : str
            "present" for the ranks that have data in a step; "all" for all of them, which gives all samples the same
            weight.

        Raises
        ------
        UsageError
            The model is not a DDP, or the mode is not `BSP`.
        BackendError
            Another rank failed, or raised an error inside. Ranks that have left the block, and models whose buffers DDP
            broadcasts, may get another error from torch instead: when the process of that rank ends.
        """
        if not isinstance(model, DistributedDataParallel):
            raise UsageError(
                f"model must be a DistributedDataParallel, got a {type(model).__name__}; give join the wrapped model"
            )
        self._connect()
        if isinstance(self.buckets, RecoveringExchange):
            raise UsageError(
                "join uses DDP's process group, which cannot lose a rank; leave fault_tolerance out with it"
            )
        if isinstance(self.buckets, ModeExchange):
            raise UsageError(f"join needs sync bsp, whose steps wait for all ranks, got {self.mode}")
        if self._ef21 is not None:
            raise UsageError(
                "join divides by the ranks with data, and ef21 keeps what the others have sent; leave one out"
            )
        buckets = self.buckets
        presence = DataPresence(self.size, buckets.total, here=1, divide_by=divide_by)
        buckets.presence = presence
        try:
            with (
                model.join(divide_by_initial_world_size=True),
                share_failure(self.communicator, "inside join"),
            ):
                yield
                presence.here = 0
        finally:
            buckets.presence = None

    def _check_join(self, model: DistributedDataParallel) -> None:
        """Refuse torch's own join, which repeats steps of others without `join`, unless it divides by all ranks."""
        if not isinstance(self.buckets, ModeExchange) and (
            self.buckets.presence is not None or model._divide_by_initial_world_size
        ):
            return
        text = (
            "model.join() does not pass the number of ranks with data to the hook, and modes other than bsp do not "
            "wait for it; write `with state.join(model):` in its place, in mode bsp"
        )
        if self.communicator is not None:
            with suppress(BackendError):
                self.communicator._refuse(text)
        raise UsageError(text)

    @property
    def gap(self) -> int | None:
        """With `SSP` and `ASP`, how many steps this rank was ahead of the slowest after its own, at most."""
        known = self._copied is None and isinstance(self.buckets, ModeExchange)
        return self.buckets.gap if known and isinstance(self.buckets, ModeExchange) else None

    def close(self) -> None:
        """Close the communicator and all it has made, but not the process group. Closing twice is allowed.

        Call `finish` before; if a mode has left ranks with parameters of their own, a warning says so. Call it last
        before ``torch.distributed.destroy_process_group()``: it waits for the threads in which gloo has run collectives
        of any user, which might otherwise hang or abort the process when that ends (`gloo_threads`).
        """
        if self._copied is not None:
            return
        if isinstance(self.buckets, ModeExchange):
            self.buckets.close()
        if self.communicator is not None:
            self.communicator.close()
        wait_for_gloo_threads()
        self._leave()

    def __copy__(self) -> "HookState":
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookState":
        arguments = dict(self._arguments)
        if (listed := arguments["parameters"]) is not None:
            arguments["parameters"] = [  # parameters of a model copied with it
                (one[0], memo.get(id(one[1]), one[1])) if isinstance(one, tuple) else memo.get(id(one), one)
                for one in listed
            ]
        made: HookState = HookState.__new__(HookState)
        made._init_copy(arguments, self.state_dict(), self._changed, self._without_scale)
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        if self._arguments["group"] is not None:
            raise UsageError(
                "a HookState with group= cannot be pickled, since a process group belongs to its process; save "
                "state.state_dict()"
            )
        arguments, lacks_scale = dict(self._arguments), self._without_scale
        if not isinstance(arguments["loss_scale"], Real | FunctionType | None):
            arguments["loss_scale"], lacks_scale = None, True
        return {
            "arguments": arguments,
            "state": self.state_dict(),
            "changed": self._changed,
            "lacks_scale": lacks_scale,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        arguments, old = dict(state["arguments"]), {}
        for name in DeprecatedOptions.__annotations__:  # of a state that an earlier version has pickled
            if name in arguments:
                old[name] = arguments.pop(name)
        found = current_options(old, **{name: arguments.get(name) for name in _GROUPS})
        arguments |= dict(zip(_GROUPS, found, strict=True))
        self._init_copy(arguments, state["state"], state["changed"], state.get("lacks_scale", False))

    def _init_copy(
        self, arguments: dict[str, Any], state: dict[str, Any], changed: bool, lacks_scale: bool
    ) -> None:
        self._loss_scale, self._without_scale = LossScale(arguments["loss_scale"]), lacks_scale
        self._arguments, self._copied, self._changed = arguments, state, changed
        self.rank, self.size, self.momentum = state["rank"], state["ranks"], state["momentum"]
        self.mode = mode_of(arguments["sync"])
        self.communicator, self.shrunk = None, ()
        self.reason = "this copy of a HookState has not connected to the other ranks yet"
        self.recorder = Recorder("hook", ranks=self.size)
        self.recorder.step = state["step"]
        self._registered = arguments["fault_tolerance"] is None
        self._model = lambda: None
        self._seen_parameters = (set(), False)

    def _connect(self) -> None:
        """Connect a copy to the other ranks, which must do so too, and restore the state that it carries.

        Raises `UsageError` if the copied state had lost ranks or joined, or was pickled without its loss scale, or as
        the constructor raises; `BackendError` if the rendezvous fails.
        """
        if self._copied is None:
            return
        if self._changed:
            raise UsageError(
                "this copy is of a HookState whose membership has changed, and its process group is that from "
                "before; make a HookState for the present ranks, and load state_dict() of the copy"
            )
        if self._without_scale:
            raise UsageError(
                "this HookState was loaded without the object that knows its loss scale; set state.loss_scale to the "
                "present GradScaler, or to None"
            )
        state, registered = self._copied, self._registered
        try:
            HookState.__init__(self, **self._arguments)
        except BaseException:
            self._copied = state
            raise
        self._registered = registered
        self.load_state_dict(state)

    def _check_one_model(self, bucket: GradBucket) -> None:
        """Raise `UsageError` if the first bucket of a backward pass is of another model than those before."""
        seen, complete = self._seen_parameters
        if complete and bucket.index() > 0:
            return
        given = {id(one) for one in bucket.parameters()}
        if bucket.index() == 0 and seen and given and seen.isdisjoint(given):
            raise UsageError(
                "this HookState counts the steps of one model, and a first bucket is not of it; make a HookState for "
                "each model, and leave out static_graph=True if gradients are sparse or of several types: its first "
                "step has many first buckets"
            )
        self._seen_parameters = (seen | given, complete or bucket.is_last())

    def _report_change(
        self, before: OriginalRanks, now: OriginalRanks, gone: OriginalRanks, lost: LostResiduals
    ) -> None:
        """Note and report that a step has ended with another membership."""
        comm, step = self.communicator, self.recorder.step
        assert comm is not None, "its membership changes"
        self.rank, self.size, self._changed = now.index(comm.original_ranks[comm.rank]), len(now), True
        self.recorder.gave("the first bucket", now, repeated=False, step=step)
        self.recorder.explain_changes(None, comm.notes[-1:])
        if without := tuple(before.index(seat) for seat in gone):
            self.shrunk = (*self.shrunk, Shrunk(step, without, len(before), len(now), lost))
        if self._on_change is not None:
            self._on_change(len(before), len(now))

    def _leave(self) -> None:
        """Destroy the group that only the hook uses; a shrunk one stays, since torch would use its name again."""
        if self._own is not None and dist.is_initialized() and self.size == dist.get_world_size():
            with suppress(ValueError):  # destroyed before, with all groups of the job
                dist.destroy_process_group(self._own)
        self._own = None


def topoplan_hook(
    state: HookState, bucket: GradBucket, shard: torch.Tensor | None = None
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over all ranks in the background: ``model.register_comm_hook(state, topoplan_hook)``.

    Returns the future of the averaged buffer of the bucket, which ends with the exchange; for the last bucket of a step
    it has ended. FSDP passes a `shard`, and is refused.

    Raises
    ------
    UsageError
        The state that was registered with the hook is not a `HookState`, or is registered with two models; or the
        caller is not DDP's reducer, but FSDP or the Python reducer of compiled DDP.
    BackendError
        In the last bucket of a step, and so from ``loss.backward()``: an exchange of the step failed. It names the
        rank, the peer, the step of training and the bucket. DDP must then be made anew, and the process group too,
        except after a `RefusedError`: the same on all ranks, since one of them has refused a bucket. Residuals are then
        as before the step.
    """
    if not isinstance(state, HookState):
        raise UsageError(
            f"state must be a HookState, got a {type(state).__name__}; write "
            "model.register_comm_hook(HookState(), topoplan_hook)"
        )
    if isinstance(bucket, torch.Tensor):
        raise UsageError(
            "topoplan_hook is for DistributedDataParallel, and FSDP called it; leave register_comm_hook out and call "
            'init_process_group("topoplan"), whose collectives FSDP and fully_shard (FSDP2) use'
        )
    if isinstance(bucket, tuple):
        raise UsageError(
            "topoplan_hook needs the buckets of DDP's reducer, which the Python reducer does not have; leave "
            'torch._dynamo.config.optimize_ddp at "ddp_optimizer"'
        )
    state._connect()
    state._check_one_model(bucket)
    if not state._registered:
        raise UsageError(
            "fault_tolerance=Shrink() needs a check of the model first; write state.register(model)"
        )
    if (model := _join_model(sys._getframe().f_back)) is not None:
        state._check_join(model)
    return state.buckets.average(bucket)


def _finite_residual(line: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(finite_residual(line.detach().cpu().numpy()))


def _join_model(caller: FrameType | None) -> DistributedDataParallel | None:
    """Return the model for which torch's join calls the hook on a rank without data, which torch does not pass.

    `caller` is None in threads of backward, in which no Python frame is above the hook.
    """
    if caller is None or caller.f_code.co_name != "_match_all_reduce_for_bwd_pass":
        return None
    found = caller.f_locals.get("self")
    return found if isinstance(found, DistributedDataParallel) else None
