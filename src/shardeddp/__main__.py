"""``python -m shardeddp``: the command line."""

import sys

from shardeddp_cli import main

if __name__ == "__main__":
    sys.exit(main())
