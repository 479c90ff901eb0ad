"""``python -m fractrain_fx`` is the ``fractrain`` command."""

import sys

from fractrain_fx.cli import main

sys.exit(main())
