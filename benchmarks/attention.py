"""`mgk bench` without an installation: python benchmarks/attention.py [options of mgk bench]."""

import sys

from mgk.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    main()
