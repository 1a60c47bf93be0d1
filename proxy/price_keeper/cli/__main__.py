"""`python -m price_keeper.cli` is the command `price-keeper`."""

import sys

from price_keeper.cli import main

if __name__ == "__main__":
    sys.exit(main())
