"""Faults while a run is trained: kills, full and read-only disks, damaged files.

`make test-faults` tries every case and writes results/faults.csv; test_faults.py tries a sample.
"""
