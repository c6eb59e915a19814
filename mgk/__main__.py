"""Entry point of `python -m mgk`."""

from mgk.cli import main

# Worker processes of the profiler import this module under another name.
if __name__ == "__main__":
    main()
