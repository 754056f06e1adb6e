"""Keep residuals of sparse gradients by parameter, independent of the buckets that hold these from step to step.

A communicator keeps one residual for a bucket. When buckets are rearranged, residuals are split and merged to match
the new layout. A parameter whose gradient is zero throughout on this rank takes no part in the step: no rank may have
used it, and then DDP drops its average, and with it the entries sent. Its residual and its velocity wait here until it
has a gradient again.

Parameters are identified by numbers: those of a given order, or of their arrival in buckets. DDP rearranges its buckets
after the first step, so a bucket is identified by its parameters, not by its place. A checkpoint lists the buckets in
which parameters arrived; if they arrive in others, their numbers mean something else. All residuals stay where the
gradients are, on a GPU in its memory; only a checkpoint comes to the host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from collectives.communicator.communicator import Communicator
from topoplan.errors import UsageError

LONGEST = 48
"""Characters of a key's list of parameters before it is cut."""


class ParameterNumbers:
    """Numbers of parameters, the same for the same tensor: those given from 0, others as they arrive.

    `arrivals` lists for each bucket the `real_count` of the parameters that it brought first; None if all were given.

    >>> one, other = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    >>> numbers = ParameterNumbers([one])
    >>> numbers.of(other), numbers.of(one), numbers.of(other)
    (1, 0, 1)
    """

    def __init__(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        self._known: dict[int, tuple[int, torch.Tensor]] = {}
        self.arrivals: list[list[int]] | None = [] if parameters is None else None
        for parameter in tensors_of(parameters or ()):
            self.of(parameter)

    def of(self, parameter: torch.Tensor) -> int:
        """Return the number of a parameter."""
        # the tensor is held so that no other one gets its identity
        return self._known.setdefault(id(parameter), (len(self._known), parameter))[0]

    def of_bucket(self, parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Return the numbers of a bucket's parameters."""
        fresh = [real_count(one) for one in parameters if id(one) not in self._known]
        if fresh and self.arrivals is not None:
            self.arrivals.append(fresh)
        return tuple(self.of(one) for one in parameters)

    def fit(self, saved: Sequence[Sequence[int]] | None) -> bool:
        """Return whether numbers so far mean the same as in a run with these arrivals.

        >>> numbers = ParameterNumbers()
        >>> numbers.of_bucket([torch.zeros(2), torch.zeros(3)])
        (0, 1)
        >>> numbers.fit([[2, 3], [5]]), numbers.fit([[3], [2, 5]]), numbers.fit(None)
        (True, False, False)
        """
        if self.arrivals is None or saved is None:
            return self.arrivals is saved
        return self.arrivals == [list(one) for one in saved[: len(self.arrivals)]]


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """The parameters of a bucket, one after another in its buffer.

    `numbers` are those of `ParameterNumbers`; `lengths` the `real_count` of each: DDP's buckets hold complex gradients
    as real numbers.

    >>> layout = BucketLayout((7, 6, 5, 9), (10, 200, 10, 1))
    >>> layout.key, layout.size, list(layout.parts())[1]
    ('parameters 7-5,9', 221, (6, 10, 210))
    """

    numbers: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the bucket's buffer."""
        return sum(self.lengths)

    @property
    def key(self) -> str:
        """Name that only a bucket of the same parameters in the same order has."""
        return _parameters_text(self.numbers)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Yield number, first and last element (exclusive) of each parameter."""
        start = 0
        for number, length in zip(self.numbers, self.lengths, strict=True):
            yield number, start, start + length
            start += length


@dataclass(frozen=True, slots=True, eq=False)
class ParameterResidual:
    """Residual of one parameter, an (n,) tensor, and its velocity; None without momentum."""

    residual: torch.Tensor
    velocity: torch.Tensor | None = None

    def empty(self) -> bool:
        """Return whether all entries are zero."""
        return not self.residual.any() and (self.velocity is None or not self.velocity.any())

    def copy(self, device: torch.device | None = None) -> ParameterResidual:
        """Return a copy, on the same device or on another one."""
        velocity = None if self.velocity is None else self.velocity.detach().to(device, copy=True)
        return ParameterResidual(self.residual.detach().to(device, copy=True), velocity)

    def plus(self, other: ParameterResidual) -> ParameterResidual:
        """Return the sum of both."""
        if self.velocity is None or other.velocity is None:
            velocity = other.velocity if self.velocity is None else self.velocity
        else:
            velocity = self.velocity + other.velocity
        return ParameterResidual(self.residual + other.residual, velocity)


class ParameterResiduals:
    """Residuals of one rank; the communicator keeps those of the present buckets."""

    def __init__(self, communicator: Communicator, *, momentum: float) -> None:
        self._communicator = communicator
        self._momentum = momentum
        self._layouts: dict[str, BucketLayout] = {}
        self._waiting: dict[int, ParameterResidual] = {}

    def arrange(
        self,
        layout: BucketLayout,
        *,
        idle: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        step: int,
    ) -> None:
        """Prepare the residual of a bucket for its gradients, without the `idle` parameters; `dtype` is the residual's.

        Raises `UsageError` if a restored residual has another length than its parameter.
        """
        known = layout.key in self._layouts
        if known and not idle and self._waiting.keys().isdisjoint(layout.numbers):
            return
        held = set(layout.numbers)
        touched = [key for key, other in self._layouts.items() if not held.isdisjoint(other.numbers)]
        taken = _split_residuals(self._communicator._take_sparse_state(touched), self._layouts)
        self._waiting = _merge_residuals(self._waiting, taken)
        for key in touched:
            del self._layouts[key]
        self._layouts[layout.key] = layout
        residual = torch.zeros(layout.size, dtype=dtype, device=device)
        velocity = torch.zeros_like(residual) if self._momentum else None
        for number, start, stop in layout.parts():
            if number in idle or number not in self._waiting:
                continue
            kept = self._waiting.pop(number)
            if kept.residual.numel() != stop - start:
                raise UsageError(
                    f"the residual of parameter {number} must have {stop - start} elements, got "
                    f"{kept.residual.numel()}; load the checkpoint into the model that it was saved from"
                )
            residual[start:stop] = kept.residual
            if velocity is not None and kept.velocity is not None:
                velocity[start:stop] = kept.velocity
        state = {"residual": residual, "velocity": velocity, "momentum": self._momentum, "step": step}
        self._communicator._put_sparse_state({layout.key: [state]})

    def by_parameter(self) -> dict[int, ParameterResidual]:
        """Return copies of the residuals on the host, by the numbers of the parameters that have any."""
        state = self._communicator.sparse_state()
        there = _split_residuals(
            {key: [{**one, **_tensors(one)} for one in listed] for key, listed in state.items()},
            self._layouts,
        )
        host = torch.device("cpu")
        waiting = {number: kept.copy(host) for number, kept in self._waiting.items()}
        found = _merge_residuals(waiting, there)
        return {number: kept.copy() for number, kept in sorted(found.items()) if not kept.empty()}

    def snapshot(self) -> tuple[Callable[[], None], dict[str, list[Any]]]:
        """Return a function that restores the present residuals at any time, and copies of them on the host."""
        kept = self._communicator.sparse_state()
        state: dict[str, list[Mapping[str, Any]]] = {key: [*listed] for key, listed in kept.items()}
        layouts, waiting = dict(self._layouts), dict(self._waiting)

        def back() -> None:
            self._communicator.restore_sparse_state(state)
            self._layouts, self._waiting = dict(layouts), dict(waiting)

        lines = {key: [one["residual"] for one in listed] for key, listed in state.items()}
        lines |= {f"parameter {number}": [one.residual.cpu().numpy()] for number, one in waiting.items()}
        return back, lines

    def drop_waiting(self) -> dict[int, ParameterResidual]:
        """Drop the residuals that no bucket has taken yet, and return them."""
        waiting, self._waiting = self._waiting, {}
        return waiting

    def replace(self, kept: Mapping[int, ParameterResidual]) -> None:
        """Replace the residuals by what `by_parameter` returned."""
        self._communicator.restore_sparse_state({})
        self._layouts.clear()
        self._waiting = dict(kept)


def _merge_residuals(
    one: Mapping[int, ParameterResidual], other: Mapping[int, ParameterResidual]
) -> dict[int, ParameterResidual]:
    """Return the union; both may have one parameter if ranks add up inside servers for the owner of a part."""
    found = dict(one)
    for number, kept in other.items():
        found[number] = found[number].plus(kept) if number in found else kept
    return found


def _split_residuals(
    state: Mapping[str, list[dict[str, Any]]], layouts: Mapping[str, BucketLayout]
) -> dict[int, ParameterResidual]:
    found = {}
    for key, (one,) in state.items():
        for number, start, stop in layouts[key].parts():
            velocity = one["velocity"]
            found[number] = ParameterResidual(
                one["residual"][start:stop], None if velocity is None else velocity[start:stop]
            )
    return found


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    velocity = state["velocity"]
    return {
        "residual": torch.from_numpy(state["residual"]),
        "velocity": None if velocity is None else torch.from_numpy(velocity),
    }


def real_count(tensor: torch.Tensor) -> int:
    """Return how many real numbers a tensor holds: two for each complex element.

    >>> real_count(torch.zeros(3, 2)), real_count(torch.zeros(3, 2, dtype=torch.complex64))
    (6, 12)
    """
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return real and imaginary parts of a complex tensor, in its memory unless it is conjugated when read."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def gradient_view(line: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter as a view of its part of DDP's buffer, an (n,) line of real numbers.

    `GradBucket.gradients` gives wrong views of complex gradients and of parameters in another order than row by row,
    such as channels_last.

    >>> gradient_view(torch.arange(4.0), torch.zeros(2, 2).T).tolist()
    [[0.0, 2.0], [1.0, 3.0]]
    >>> gradient_view(torch.arange(4.0), torch.zeros(2, dtype=torch.complex64)).tolist()
    [1j, (2+3j)]
    """
    if parameter.is_complex():
        line = torch.view_as_complex(line.view(line.numel() // 2, 2))
    # strides are preserved exactly where a parameter's memory has no gaps, and there DDP keeps them too
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return line.as_strided(parameter.shape, parameter.stride()) if dense else line.view(parameter.shape)


def named_tensors_of(parameters: object) -> tuple[list[torch.Tensor], tuple[str, ...] | None]:
    """Return the parameters, and their names if they are pairs, as of ``model.named_parameters()``.

    >>> named_tensors_of(torch.nn.Linear(3, 2).named_parameters())[1]
    ('weight', 'bias')
    """
    listed = list(parameters) if isinstance(parameters, Iterable) else parameters
    pairs = listed if isinstance(listed, list) and not isinstance(parameters, torch.Tensor | str) else []
    if pairs and all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in pairs):
        return tensors_of([one for _, one in pairs]), tuple(name for name, _ in pairs)
    return tensors_of(listed if pairs else parameters), None


def tensors_of(parameters: object) -> list[torch.Tensor]:
    """Return the parameters as a list.

    Raises `UsageError` for anything but tensors, such as a model or pairs of names and parameters.

    >>> tensors_of(torch.nn.Linear(3, 2))
    Traceback (most recent call last):
    topoplan.errors.UsageError: parameters must be tensors, got a Linear; give model.parameters()
    """
    if not isinstance(parameters, Iterable) or isinstance(parameters, torch.Tensor | str):
        raise UsageError(
            f"parameters must be tensors, got a {type(parameters).__name__}; give model.parameters()"
        )
    listed = list(parameters)
    for one in listed:
        if not isinstance(one, torch.Tensor):
            raise UsageError(
                f"parameters must be tensors, got a {type(one).__name__}; give model.parameters()"
            )
    return listed


@lru_cache(maxsize=1024)
def _parameters_text(numbers: tuple[int, ...]) -> str:
    """Return a short text of parameters; cached, since buckets are the same in every step."""
    listed = ",".join(_runs(numbers))
    if len(listed) > LONGEST:
        listed = f"{listed[:LONGEST]}... {hashlib.sha256(listed.encode()).hexdigest()[:12]}"
    return f"parameters {listed}"


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield a text for each run of neighbours that go up or down by one.

    >>> list(_runs([3, 4, 5, 9, 8, 0]))
    ['3-5', '9-8', '0']
    """
    run: list[int] = []
    for number in numbers:
        ahead = len(run) < 2 or number - run[-1] == run[1] - run[0]
        if run and (abs(number - run[-1]) != 1 or not ahead):
            yield f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
            run = []
        run.append(number)
    if run:
        yield f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
