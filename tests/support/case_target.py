"""Runs cases that end as told, without torch: ``python -m tests.support.case_target --cases F --rows F``."""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    given = parser.parse_args()
    for case in json.loads(given.cases.read_text()):
        ends = case["ends"]
        if ends == "dies":
            print("MemoryError: no room", flush=True)  # as a process says that was not asked to write a row
            os._exit(1)
        if ends == "hangs":
            print("hangs", flush=True)
            time.sleep(600)
        row = {
            "case": case,
            "status": ends,
            "message": None,
            "figures": {"pid": os.getpid()},
        }
        with given.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        time.sleep(case.get("after", 0))
        if ends in ("oom", "failed"):
            sys.exit(3)


main()
