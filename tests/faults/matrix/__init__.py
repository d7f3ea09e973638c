"""The fault matrix: every fault at every phase of a run in every mode, with the outcome written down beforehand."""
