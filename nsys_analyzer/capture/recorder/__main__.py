"""``python -m nsys_analyzer.capture.recorder --output trace.json.gz -- PROGRAM``."""

import sys

from nsys_analyzer.capture.recorder.record import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
