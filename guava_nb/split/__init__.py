"""The two-sided form: the script with the data and the script with the model; knows sessions and runs, trains nothing itself."""

from guava_nb.split.cpu import CPULoader
from guava_nb.split.gpu import ColabGPUTrainer, GPUTrainer

__all__ = ["CPULoader", "ColabGPUTrainer", "GPUTrainer"]
