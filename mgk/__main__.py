"""Entry point of `python -m mgk`."""

from mgk.cli import main

# Worker processes import this file under another name.
if __name__ == "__main__":
    main()
