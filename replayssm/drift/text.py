"""The text that is always at hand: the sources of this interpreter's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from replayssm.checks import fail

# Modules that the miniatures were not trained on, in the order in which they are read.
HELD_OUT = (
    "inspect.py",
    "tarfile.py",
    "argparse.py",
    "subprocess.py",
    "difflib.py",
    "typing.py",
    "doctest.py",
    "ssl.py",
    "pickle.py",
    "statistics.py",
)
# Tables, and packages that not every interpreter has.
_LEFT_OUT = ("test", "tests", "encodings", "lib2to3", "distutils", "ensurepip", "site-packages", "dist-packages")
_SEPARATOR = b"\n\n\n"


def library() -> Path:
    """The folder that holds the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def training_documents() -> list[bytes]:
    """Every module but the held-out ones, in the order of their paths."""
    root = library()
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    kept = [p for p in paths if not set(p.parts) & set(_LEFT_OUT) and p.as_posix() not in HELD_OUT]
    return [text for path in kept if len(text := (root / path).read_bytes()) >= 512]


def held_out_text(length: int) -> bytes:
    """The first `length` bytes (-1: all) of the held-out modules, one after the other."""
    root = library()
    text = _SEPARATOR.join((root / name).read_bytes() for name in HELD_OUT if (root / name).exists())
    if length > len(text):
        raise fail("length", length, f"at most {len(text)}, the size of the held-out modules")
    return text if length < 0 else text[:length]


def join(documents: list[bytes]) -> bytes:
    """One text of many."""
    return _SEPARATOR.join(documents)
