"""`python -m lightning_3d` is `lightning-3d`."""

import sys

from lightning_3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
