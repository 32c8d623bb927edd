"""`python -m replayssm.cli`."""

import sys

from replayssm.cli import main

sys.exit(main())
