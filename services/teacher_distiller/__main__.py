"""python -m rollstream.services.teacher_distiller --help"""

import sys

from rollstream.shared.serve import main

if __name__ == "__main__":
    sys.exit(main("teacher-distiller"))
