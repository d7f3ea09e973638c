"""The two-sided form: data and DataLoader in one script, model and optimizer in another; neither side trains in another way than every run does."""

from guava_nb.split.cpu import CPULoader
from guava_nb.split.gpu import ColabGPUTrainer, GPUTrainer

__all__ = ["CPULoader", "ColabGPUTrainer", "GPUTrainer"]
