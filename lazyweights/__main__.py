"""``python -m lazyweights``."""

import sys

from lazyweights.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
