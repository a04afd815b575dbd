"""Files that are either complete or absent, digests that name content, and which of several processes writes."""

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError


def publish(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write(temporary)`, flush the result to disk, then rename it to `path`: a crash leaves the old file or the new.

    The temporary file lies beside `path` (a rename is atomic only within one file system) and is removed on failure. Who may read
    the result is as the umask says, whatever `write` made of it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    try:
        write(temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.chmod(mode)
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

    Other files of `folder` stay. What a crash leaves beside it is removed by the next call. Who may read the files is as the umask
    says: writers of weights make theirs the owner's alone.
    """
    folder = folder.resolve()
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _make(partial, folder)
        mode = stat.S_IMODE(partial.stat().st_mode) & 0o666
        write(partial)
        folder.mkdir(exist_ok=True)
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            path.chmod(mode)
            with path.open("rb") as written:
                os.fsync(written.fileno())
            place = folder / path.relative_to(partial)
            place.parent.mkdir(exist_ok=True)
            if place.is_dir():
                raise UserError(f"{place}: is a folder where a file must be written; remove it")
            path.replace(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make(partial: Path, folder: Path) -> None:
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # said elsewhere, with what to do
            raise
        raise UserError(f"{folder}: cannot be made ({error.strerror}); give another folder") from error


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def check_folder_place(folder: Path) -> None:
    """Raises UserError where `publish_files` cannot write this folder: before any work is done, and without making anything."""
    try:
        for place in (folder, *folder.parents):
            if place.is_symlink() and not place.exists():
                raise UserError(f"{folder}: {place} is a link to nothing ({os.readlink(place)}); give another folder")
        place = folder.resolve()
        if not place.name:
            raise UserError(f"{folder}: is no place for files; give a folder below it")
        there = next(above for above in (place, *place.parents) if above.exists())
        if not there.is_dir():
            raise UserError(f"{folder}: {there} is a file, so no folder can be there; give another folder")
        for needed in {there, place.parent if place.exists() else there}:
            if not os.access(needed, os.R_OK | os.W_OK | os.X_OK):
                raise UserError(f"{folder}: you may not write in {needed}; give another folder")
        _partial(place).exists()  # raises where the name is too long
    except OSError as error:
        raise UserError(f"{str(folder)[:200]}: no possible folder ({error.strerror}); give another one") from error


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
