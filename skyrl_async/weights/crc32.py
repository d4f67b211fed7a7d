"""CRC-32 of files, in pieces: finds damage and mix-ups, not forgery, and takes a quarter to a half of what SHA-256 does.

Flows in: a file. Flows out: a number. Does not know what it holds.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

_PIECE_BYTES = 1 << 22


def crc32_of_file(path: Path, value: int = 0, *, check: Callable[[], None] = lambda: None) -> int:
    """CRC-32 of what came before (``value``; 0: nothing) followed by the file's bytes. Other threads run meanwhile.

    Args:
        path: of the file.
        value: of what came before.
        check: called between pieces; what it raises ends it.
    """
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            check()
            value = zlib.crc32(piece, value)
    return value
