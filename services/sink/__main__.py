"""python -m rollstream.services.sink --help"""

import sys

from rollstream.shared.serve import main

if __name__ == "__main__":
    sys.exit(main("sink"))
