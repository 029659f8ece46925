"""`python -m kvtier.cli`."""

import sys

from kvtier.cli import main

sys.exit(main())
