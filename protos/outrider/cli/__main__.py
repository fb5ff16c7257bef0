"""`python -m outrider.cli`, for where the script is not on the path."""

import sys

from outrider.cli import main

sys.exit(main())
