"""`python -m ktopt` is `ktopt`."""

import sys

from ktopt.cli import main

sys.exit(main())
