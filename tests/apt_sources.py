"""Prints the Debian entries of this machine's apt sources with the component non-free, for ``fetch_nsys.sh``.

Debian's archive is known by its suites, not by its host: a mirror may be called anything. Both formats of
``sources.list(5)`` are read: lines (``*.list``) and stanzas (``*.sources``). Options, keys and mirrors stay.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_WANTED = "non-free"
#: The names of Debian's suites beside that of the machine's own release.
_SUITES = {"stable", "oldstable", "testing", "unstable", "sid"}
_OF_A_SUITE = re.compile(r"-(updates|security|backports|proposed-updates)$")
_LINE = re.compile(r"deb\s+(?P<options>\[[^\]]*\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>[^#]+)")
#: A field of a stanza with the lines that continue it.
_FIELD = re.compile(r"^(?P<name>[\w-]+)[ \t]*:(?P<value>.*(?:\n[ \t].*)*)", re.MULTILINE)


def with_non_free_lines(text: str, codename: str) -> Iterator[str]:
    """The Debian entries of a ``.list`` file, each a line."""
    for line in text.splitlines():
        entry = _LINE.match(line.strip())
        if entry and _is_debian(entry["uri"], [entry["suite"]], entry["components"].split(), codename):
            parts = ("deb", (entry["options"] or "").strip(), entry["uri"], entry["suite"])
            yield " ".join((*filter(None, parts), *_components(entry["components"].split())))


def with_non_free_stanzas(text: str, codename: str) -> Iterator[str]:
    """The Debian entries of a ``.sources`` file, each a stanza."""
    uncommented = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for stanza in re.split(r"\n[ \t]*(?:\n[ \t]*)+", uncommented):
        fields = {field["name"].lower(): field for field in _FIELD.finditer(stanza)}
        words = {name: field["value"].split() for name, field in fields.items()}
        uri, *_ = [*words.get("uris", ()), ""]
        off = words.get("enabled", ["yes"])[0].lower() in ("no", "false", "0", "off", "without", "disable")
        here = _is_debian(uri, words.get("suites", []), words.get("components", []), codename)
        if here and "deb" in words.get("types", ()) and not off:
            changed = {"types": "deb", "components": " ".join(_components(words["components"]))}
            kept = (f"{field['name']}:{field['value']}" for name, field in fields.items() if name not in changed)
            yield "\n".join((*(f"{name.title()}: {value}" for name, value in changed.items()), *kept))


def _is_debian(uri: str, suites: list[str], components: list[str], codename: str) -> bool:
    names = {_OF_A_SUITE.sub("", suite) for suite in suites}
    return bool(names) and names <= {*_SUITES, codename} and "main" in components and not uri.startswith("cdrom:")


def _components(named: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*named, _WANTED)))


def main(sources: Path, parts: Path, codename: str, output: Path) -> int:
    """Writes ``debian.list`` and ``debian.sources`` into a folder; 1 where the machine has no Debian entry."""
    lists = [path for path in (sources, *sorted(parts.glob("*.list"))) if path.is_file()]
    lines = [line for path in lists for line in with_non_free_lines(path.read_text(), codename)]
    stanzas = [
        one for path in sorted(parts.glob("*.sources")) for one in with_non_free_stanzas(path.read_text(), codename)
    ]
    (output / "debian.list").write_text("".join(f"{line}\n" for line in lines))
    (output / "debian.sources").write_text("\n\n".join(stanzas) + "\n")
    return 0 if lines or stanzas else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
