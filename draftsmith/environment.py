"""What a result was measured on: versions, source revision, hardware. No user, host or path name, no secret."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "numpy", "safetensors", "wandb")


def describe_environment() -> dict[str, Any]:
    """JSON. Imports torch, for the accelerators that it can use."""
    import torch

    from draftsmith import __version__

    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "draftsmith": __version__,
        "revision": _revision(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": _memory(),
        "accelerators": devices,
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The model name as Linux tells it; elsewhere what the platform calls itself."""
    about = Path("/proc/cpuinfo")
    for line in about.read_text(encoding="utf-8").splitlines() if about.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> float | None:
    """Physical memory in GiB."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _revision() -> str | None:
    """The commit of this source tree, with "+changes" where files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
