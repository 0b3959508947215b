"""python -m rollstream.services.prompt_producer --help"""

import sys

from rollstream.shared.serve import main

if __name__ == "__main__":
    sys.exit(main("prompt-producer"))
