"""Describes what is wrong with the end of a command; empty if nothing is."""

from __future__ import annotations

import re

from tests.fuzz.sandbox import Outcome

#: A capture that is not broken, beside one that is.
SOUND = "sound.sqlite"
#: No terminal may get them: C0 but newline and tab, DEL, C1, and what turns the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ERROR = re.compile(r"(?:Error|Usage): ?.*")


def fault(outcome: Outcome) -> str:
    """A crash, a hang, more than one line of error, or bytes that a terminal would obey."""
    err, out = (text.decode("utf-8", errors="replace") for text in (outcome.err, outcome.out))
    if outcome.code < 0:
        return f"killed by signal {-outcome.code} after {outcome.seconds:.0f} s"
    if "Traceback (most recent call last)" in err or outcome.code not in (0, 1, 2):
        return f"exit {outcome.code}: {err.strip().splitlines()[-1] if err.strip() else ''}"
    if "Warning: " in err:
        return f"a warning of Python: {err.strip().splitlines()[0]}"
    if outcome.code == 1 and sum(bool(_ERROR.match(line)) for line in err.splitlines()) != 1:
        return f"exit 1 without its one line of error: {err[:300]!r}"
    if outcome.code == 1 and "Error:" in err and len(err.strip().splitlines()[-1]) > 2_000:
        return "an error of more than 2,000 characters"
    if "csv" in outcome.command:  # data, which goes to a pipe as it is
        out = ""
    for name, text in (("stdout", out), ("stderr", err)):
        if found := _CONTROL.search(text):
            return f"a control character on {name}: {text[max(found.start() - 40, 0) : found.end() + 10]!r}"
    return ""


def others_lost(outcome: Outcome) -> str:
    """A report that a broken capture has kept from a sound one."""
    lost = outcome.code and SOUND in outcome.command
    return f"no report of the sound capture: {outcome.err[-300:]!r}" if lost else ""
