"""`python -m finola.cli`, as torchrun and SLURM start it."""

import sys

from finola.cli.main import main

sys.exit(main())
