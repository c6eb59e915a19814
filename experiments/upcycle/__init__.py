"""Fidelity of all-MiniLM-L6-v2 with fewer key heads and value heads, against the size of its cache.

`python -m experiments.upcycle --data-dir DIR` measures what results/upcycle.csv lacks and writes docs/upcycling.md.
`python -m experiments.upcycle.decoder` does the same for trained decoders of the study of cost and quality.
"""
