"""Experiments on top of the library. Not installed: run them from a clone with `python -m experiments.NAME`."""
