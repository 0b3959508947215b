"""python -m rollstream.services.scorer --help"""

import sys

from rollstream.shared.serve import main

if __name__ == "__main__":
    sys.exit(main("scorer"))
