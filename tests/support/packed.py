"""The committed captures, which are compressed."""

from __future__ import annotations

import lzma
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FAULTS = EXAMPLES / "faults" / "captures" / "transformer"


def unpack(packed: Path, folder: Path) -> Path:
    """Writes a committed file into a folder, uncompressed if its name ends in ``.xz``, and returns its path."""
    path, content = folder / packed.name.removesuffix(".xz"), packed.read_bytes()
    path.write_bytes(lzma.decompress(content) if packed.suffix == ".xz" else content)
    return path


def unpack_fault(name: str, folder: Path) -> Path:
    """Writes the capture of a planted fault, or of the control ``none``, into a folder and returns its path."""
    return unpack(FAULTS / f"{name}.sqlite.xz", folder)
