"""The peers' own environments, made once: theirs need other versions than ours, and must not change it."""

import shutil
import subprocess
import sys
from pathlib import Path

PEERS = {  # package, and what is installed with it without its own requirements, which ask for a GPU's libraries
    "speculators": ("speculators==0.9.0", "hs-connectors==0.9.0"),
    "specforge": ("specforge==0.2.0",),
}
HERE = Path(__file__).parent


def python_of(peer: str, folder: Path) -> Path:
    """The interpreter of a peer's environment below `folder`, which is made if it is not complete."""
    place = folder / peer
    python, done = place / "bin" / "python", place / ".ready"
    if done.is_file():
        return python
    print(f"installing {PEERS[peer][0]} into {place}: some minutes", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    base = getattr(sys, "_base_executable", sys.executable)
    subprocess.run([base, "-m", "venv", str(place)], check=True)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "-r", str(HERE / f"{peer}.txt")], check=True)
    subprocess.run([*pip, "--no-deps", *PEERS[peer]], check=True)
    done.touch()
    return python
