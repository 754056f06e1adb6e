"""From measured copies between GPUs to a topology with measured links."""

from topoplan.calibration.apply import Calibration, calibrated
from topoplan.calibration.fit import Line, PairFit, fit_line, fit_pair
from topoplan.calibration.routes import Route, copy_route
from topoplan.calibration.samples import Measurement, MemoryCopy, Meter, PairSamples

__all__ = [
    "Calibration",
    "Line",
    "Measurement",
    "MemoryCopy",
    "Meter",
    "PairFit",
    "PairSamples",
    "Route",
    "calibrated",
    "copy_route",
    "fit_line",
    "fit_pair",
]
