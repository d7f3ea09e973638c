"""Layers that ranks share: how a plan is found, tried and carried out. Knows modules; knows no stage."""
