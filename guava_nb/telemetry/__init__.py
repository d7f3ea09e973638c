"""Joules, watts, rates: sensors, windows, sums. Knows no step and no session; a fault here never reaches training."""

from guava_nb.telemetry.devices import open_device
from guava_nb.telemetry.machine import MachineLoad, MachineMeter
from guava_nb.telemetry.meter import EnergyMeter
from guava_nb.telemetry.nvml import Gauges, NvmlBoard
from guava_nb.telemetry.phases import BACKWARD, EXCHANGE, FORWARD, OTHER, PHASES, UPDATE, WAITING, PhaseBook
from guava_nb.telemetry.recording.energy_recorder import EnergyRecorder
from guava_nb.telemetry.recording.energy_recording import EnergyRecording
from guava_nb.telemetry.recording.replay_sensor import ReplaySensor
from guava_nb.telemetry.sensor import NOT_MEASURED, Board, Sensor, SensorError
from guava_nb.telemetry.tasks import energy_task
from guava_nb.telemetry.window import EnergyWindow

__all__ = [
    "BACKWARD",
    "EXCHANGE",
    "FORWARD",
    "NOT_MEASURED",
    "OTHER",
    "PHASES",
    "UPDATE",
    "WAITING",
    "Board",
    "EnergyMeter",
    "EnergyRecorder",
    "EnergyRecording",
    "EnergyWindow",
    "Gauges",
    "MachineLoad",
    "MachineMeter",
    "NvmlBoard",
    "PhaseBook",
    "ReplaySensor",
    "Sensor",
    "SensorError",
    "energy_task",
    "open_device",
]
