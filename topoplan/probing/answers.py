"""Calls to NVML of which any may go unanswered: what fails is None to the caller, and is counted.

Each function of NVML can answer NotSupported, Unknown or FunctionNotFound on its own, by GPU, driver and container. A
probe that stopped there would be of no use, so it asks on and says at the end what it was not told. Only a driver that
cannot be reached at all is an error.
"""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import TypeVar

from topoplan.errors import ProbeError

Value = TypeVar("Value")

INSTEAD = "or give a machine instead: a library name (topoplan list), a file, or nvidia-smi topo -m | topoplan plan -"

_NO_SUCH_THING = ("NVMLError_InvalidArgument", "NVMLError_NotSupported", "NVMLError_NotFound")


class Answers:
    """An open connection to NVML; use as a context manager.

    Attributes
    ----------
    nvml : module
        ``pynvml`` of nvidia-ml-py, for its constants.
    unanswered : Counter of (str, str)
        Calls that failed, by function and kind of error. NotSupported, InvalidArgument and NotFound do not count: they
        say that the hardware has no such thing.
    failures : int
        How many of those were no missing function: the driver knows the question and fails to answer.
    """

    def __init__(self) -> None:
        self.nvml = _load()
        self.unanswered: Counter[tuple[str, str]] = Counter()
        self.failures = 0

    def __enter__(self) -> Answers:
        """Open the connection; ProbeError if there is no driver to answer."""
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            raise ProbeError(_no_driver(type(error).__name__, str(error))) from None
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        try:
            self.nvml.nvmlShutdown()
        except self.nvml.NVMLError as error:
            self.unanswered["nvmlShutdown", type(error).__name__] += 1

    def ask(self, function: str, *arguments: object, kind: type[Value], newer: bool = False) -> Value | None:
        """The answer of ``nvml<function>``, None where there is none or one of another kind.

        ``newer`` is for what only newer GPUs have: a driver that is too old to know the function hides nothing.
        """
        try:
            answer = getattr(self.nvml, f"nvml{function}")(*arguments)
        except (self.nvml.NVMLError, AttributeError, UnicodeError) as error:
            name = type(error).__name__
            if name not in _NO_SUCH_THING and not (newer and name == "NVMLError_FunctionNotFound"):
                self.unanswered[function, name.removeprefix("NVMLError_")] += 1
                self.failures += name != "NVMLError_FunctionNotFound"
            return None
        return answer if isinstance(answer, kind) else None

    def field(self, device: object, field: int, scope: int = 0) -> int | None:
        """A field value of a device, such as the speed of one link; None where there is none."""
        values = self.ask("DeviceGetFieldValues", device, [(field, scope)], kind=object)
        if values is None:
            return None
        value = values[0]  # type: ignore[index]
        if value.nvmlReturn != self.nvml.NVML_SUCCESS:
            return None
        names = {
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            self.nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
            self.nvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
        }
        name = names.get(value.valueType)
        return int(getattr(value.value, name)) if name else None

    def note(self) -> tuple[str, ...]:
        """One line for all that went unanswered, if anything did."""
        if not self.unanswered:
            return ()
        calls = [
            f"{function} ({error}{f', {times} times' if times > 1 else ''})"
            for (function, error), times in sorted(self.unanswered.items())
        ]
        more = f" and {len(calls) - 6} more" if len(calls) > 6 else ""
        return (f"warning: the driver did not answer {', '.join(calls[:6])}{more}; what it hides is assumed",)


def _load() -> ModuleType:
    try:
        import pynvml
    except ImportError:
        raise ProbeError(f"the probe needs nvidia-ml-py: pip install nvidia-ml-py; {INSTEAD}") from None
    module: ModuleType = pynvml
    if not hasattr(module, "nvmlDeviceGetHandleByIndex"):
        raise ProbeError(
            "the module pynvml here is not nvidia-ml-py's: pip uninstall pynvml, then pip install nvidia-ml-py"
        )
    return module


def _no_driver(kind: str, message: str) -> str:
    if kind == "NVMLError_LibraryNotFound":
        cause = "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found); install it"
    elif kind == "NVMLError_DriverNotLoaded":
        cause = "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia) and see dmesg"
    elif kind == "NVMLError_LibRmVersionMismatch":
        cause = "the NVIDIA driver and its library differ in version; reboot, or install one version of both"
    elif kind == "NVMLError_NoPermission":
        cause = "the NVIDIA driver may not be used by this user; run with access to /dev/nvidia*"
    else:
        cause = f"the NVIDIA driver does not answer ({message.strip()}); see nvidia-smi"
    return f"{cause}, {INSTEAD}"
