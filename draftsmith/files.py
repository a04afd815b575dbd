"""Files that are either complete or absent, digests that name content, and which of several processes writes."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def publish(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(temporary)`, flush the result to disk, then rename it to `path`: a crash leaves the old file or the new.

    The temporary file lies beside `path` (a rename is atomic only within one file system) and is removed on failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def publish_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    publish(path, write)


def publish_files(folder: Path, write: Callable[[Path], None]) -> None:
    """Call `write(temporary folder)` and move what it wrote into `folder`, flushed to disk, each file complete or as before.

    Other files of `folder` stay. What a crash leaves beside it is removed by the next call.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        folder.mkdir(exist_ok=True)
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            with path.open("rb") as written:
                os.fsync(written.fileno())
            place = folder / path.relative_to(partial)
            place.parent.mkdir(exist_ok=True)
            path.replace(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def publish_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    publish_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def digest(value: Any) -> str:
    """Sixteen hex digits that name a JSON-serialisable value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]  # a file's name need not be UTF-8


def is_main() -> bool:
    """Whether this process is the only one or the first of its launch: the one that writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def several_ranks() -> bool:
    """Whether `accelerate launch` started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") != "1"
