"""Makes shards of a model in float32: python shards.py FOLDER RANKS OUT."""

import sys

from kvtier.cli import main

if __name__ == "__main__":
    folder, ranks, out = sys.argv[1:]
    sys.exit(main(["weights", "shard", folder, "--tp", ranks, "--out", out, "--dtype", "float32"]))
