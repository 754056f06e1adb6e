"""Call everything that a module exports with arguments of wrong types, one at a time, and collect raw errors.

Arguments that an export requires come by their names from a table; a name that the table does not have is None, which
is a wrong argument too. So a new export is checked without an entry. Methods are called on results of the functions of
the packages, and on what a class makes of such arguments.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from zlib import crc32

import numpy as np

import collectives
import topoplan
from tests.support.checkout import ROOT
from topoplan.errors import TopoplanError

PACKAGES = (f"{ROOT}/topoplan/", f"{ROOT}/collectives/")


class _Unknown:
    """An object that has nothing."""


ODD: tuple[object, ...] = (
    *(None, "x", "gpu0-gpu3=5", "", 5, 1.5, float("nan"), -1, True, b"x", Path("/missing/x"), _Unknown()),
    *([], [5], [2, 4], ["x"], {}, {"x": "y"}, {1: 2}, (None,), [[None]], [1.5], np.float32(0.5)),
)
"""Arguments that most parameters cannot take; an export may use the ones that it takes."""

MADE_BY_THE_PACKAGE = (
    *("ClusterByKind", "Grown", "Handle", "LatePlan", "MeshPlans", "Plan", "PlanByKind", "PreparedCall"),
    *("ProcessGroupTopoplan", "RankPart", "Replanned", "Result", "ShardedCompression", "Shrunk", "SizePlans"),
    *("SurvivalPlans", "TransferTable", "Tree"),
)
"""Classes that callers get, and do not make: their methods are called, they are not."""

WITH_INNER_OBJECTS = (
    *("ClusterByKind.joined", "ClusterByKind.server", "PlanByKind.images", "PlanByKind.template_height"),
    "PlanByKind.with_templates",
)
"""Methods of the planner, whose arguments are objects that nothing exported returns."""

SETTINGS = (
    *("ASP", "BSP", "Cast", "CommonRows", "DiLoCo", "LocalSGD", "LowRank", "Quantize", "SSP", "Shrink"),
    *("SparseLoCo", "Threshold", "TopK"),
)
"""Classes that callers make and hand over: their methods are the training step's."""

ENDING = ("abort", "close")
"""Methods after which an object cannot be used."""


class Doors:
    """Arguments of the exports of modules, and the raw errors that other arguments raise; files go into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw: list[str] = []
        self.walked: set[object] = set()
        self.calls = 0

    @cached_property
    def known(self) -> dict[str, Any]:
        """Arguments by the names of parameters, or of an export and its parameter."""
        machine = topoplan.load("v100x4")
        plan = topoplan.plan(machine)
        cluster = topoplan.cluster_by_kind(["v100x4"] * 2, nic_gbps=100)
        by_kind = topoplan.plan_by_kind(cluster, "allreduce")
        survival, mesh = topoplan.plan_survival(machine), topoplan.plan_mesh(machine, {"dp": 2, "tp": 2})
        array = np.ones(64, np.float32)
        (self.folder / "log.txt").write_text("# nThread 1 nGpus 4\n", encoding="utf-8")
        for name, made in (("plan", plan), ("mesh", mesh), ("survival", survival), ("by_kind", by_kind)):
            (self.folder / name).write_text(made.to_json(), encoding="utf-8")
        return {
            **dict.fromkeys(("topology", "machine", "first", "second", "source"), machine),
            **dict.fromkeys(("plan", "before", "after"), plan),
            **dict.fromkeys(("array", "x"), array),
            "arrays": [array] * 4,
            "bandwidth": 25,
            "book": survival,
            "channel": "nvlink",
            "chunk_elements": 16,
            "cluster": cluster,
            "collective": "allreduce",
            "count": 2,
            "density": 0.01,
            "dst": "gpu1",
            "dtype": "float16",
            "end": "b",
            "epoch": 1,
            "every": 2,
            "gbps": 5,
            "gpus": [0, 1],
            "k": 4,
            "kind": "gpu",
            "late": {1: 0.001},
            "learning_rate": 0.1,
            "listings": (),
            "log": self.folder / "log.txt",
            "make": lambda *_, **__: plan,
            "mesh": {"dp": 2, "tp": 2},
            "name": "walked",
            "names": ["cpu0"],
            "nbytes": "64MB",
            "nic_gbps": 100,
            "parameters": [array.copy()],
            "path": self.folder / "plan",
            "period": 2,
            "probabilities": np.full((4, 4), 0.25),
            "rank": 0,
            "rings": [[0, 1, 2, 3]],
            "servers": ["v100x4"] * 2,
            "size": 64,
            "speeds": {"gpu0-gpu1": 10},
            "src": "gpu0",
            "staleness": 1,
            "start": "a",
            "table": collectives.lower(plan, 64, chunk_elements=16),
            "threshold": 0.1,
            "to": "nccl-topo",
            "trees": [[0, 1, 2, 3]],
            "wires": ["gpu0-gpu1"],
            "load_mesh.path": self.folder / "mesh",
            "load_survival.path": self.folder / "survival",
            "load_plan_by_kind.path": self.folder / "by_kind",
            "rank_part.plan": by_kind,
            "three_phase.topology": topoplan.cluster(["v100x4"] * 2, nic_gbps=100),
            "nvswitch_cluster.servers": 2,
            "lower.count": 64,
            "plan_by_size.sizes": ["1KB", "1GB"],
        }

    def walk(self, module: ModuleType, share: int) -> None:
        """Call every export of a module, with one of ``share`` odd arguments in the place of each parameter."""
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            for name, export in self._exports(module):
                self._odd_calls(name, export, share)
        finally:
            os.chdir(here)
            for name in (one for one in (*ODD, "walked") if isinstance(one, str) and one):
                topoplan.register_schedule(name, None)

    def _exports(self, module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
        """Yield exported functions, classes, and methods, each of an object of its own where that can be made."""
        communicator = collectives.Communicator(self.known["plan"])
        handle = communicator.all_reduce(self.known["arrays"], async_op=True)
        made: dict[type, object] = {type(handle): handle}
        classes = []
        for name in module.__all__:
            export = getattr(module, name)
            if export in self.walked:
                continue
            self.walked.add(export)
            if not isinstance(export, type):
                yield name, export
                if not any(cls.__name__ == inspect.signature(export).return_annotation for cls in made):
                    made |= self._returned(name, export)
            elif not issubclass(export, Exception):
                classes.append((name, export))
        for name, cls in classes:
            if name not in MADE_BY_THE_PACKAGE:
                yield name, cls
            for member in sorted(set(dir(cls)) - {*ENDING}):
                found = inspect.getattr_static(cls, member)
                if member.startswith("_") or name in SETTINGS or f"{name}.{member}" in WITH_INNER_OBJECTS:
                    continue
                if isinstance(found, (staticmethod, classmethod)):
                    yield f"{name}.{member}", getattr(cls, member)
                elif inspect.isfunction(found):
                    own = {} if name in MADE_BY_THE_PACKAGE else self._returned(name, cls)
                    if (one := own.get(cls, made.get(cls))) is not None:
                        yield f"{name}.{member}", getattr(one, member)

    def _returned(self, name: str, export: Callable[..., object]) -> Mapping[type, object]:
        """Return what an export returns for arguments that it takes, by its type."""
        try:
            result = export(**self._given(name, export))
        except (TopoplanError, TypeError, ValueError, AttributeError):
            return {}
        return {type(result): result}

    def _given(self, name: str, export: Callable[..., object]) -> dict[str, Any]:
        """Return arguments for the parameters without a default, and those that the table has for this export."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(export).parameters.values()
        needed = (one.name for one in parameters if one.default is one.empty and one.kind not in several)
        stated = {one.name: f"{name}.{one.name}" for one in parameters}
        own = {one: self.known[key] for one, key in stated.items() if key in self.known}
        return {one: self.known.get(one) for one in needed} | own

    def _odd_calls(self, name: str, export: Callable[..., object], share: int) -> None:
        given = self._given(name, export)
        for one in inspect.signature(export).parameters.values():
            turn = crc32(f"{name}.{one.name}".encode())
            for number, odd in enumerate(ODD):
                if (number + turn) % share == 0 and one.kind is not one.VAR_KEYWORD:
                    what = f"{name}({one.name}={odd!r:.40})"
                    if one.kind is one.VAR_POSITIONAL:
                        self._call(what, partial(export, *given.values(), odd))
                    else:
                        self._call(what, partial(export, **{**given, one.name: odd}))

    def _call(self, what: str, call: Callable[[], object]) -> None:
        self.calls += 1
        try:
            call()
        except TopoplanError as error:
            if "\n" in str(error):
                self.raw.append(f"{what}: several lines: {error}")
        except Warning:  # of a deprecated name
            pass
        except Exception as error:
            if not _is_said(error):
                place = traceback.extract_tb(error.__traceback__)[-1]
                self.raw.append(
                    f"{what}: {place.filename.removeprefix(f'{ROOT}/')}:{place.lineno}: {error!r}"
                )


def _is_said(error: Exception) -> bool:
    """Whether Python refused the call by its signature, or the package raised a TypeError or ValueError on purpose."""
    places = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, (TypeError, ValueError)):
        return False
    raised = (places[-1].line or "").startswith("raise ") and places[-1].filename.startswith(PACKAGES)
    return raised or not any(place.filename.startswith(PACKAGES) for place in places)
