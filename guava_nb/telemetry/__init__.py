"""Joules, watts and what they bought: sensors, windows, sums. A fault here never reaches training."""

from guava_nb.telemetry.meter import EnergyMeter
from guava_nb.telemetry.sensor import NOT_MEASURED, Board, Sensor, SensorError
from guava_nb.telemetry.window import BoardEnergy, EnergyWindow, once_each

__all__ = ["NOT_MEASURED", "Board", "BoardEnergy", "EnergyMeter", "EnergyWindow", "Sensor", "SensorError", "once_each"]
