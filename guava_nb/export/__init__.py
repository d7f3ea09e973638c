"""A plain program of a run, for torchrun, Ray Train or Lightning Fabric; see README.md."""
