"""The pictures of docs/report.md, from a run's own page: `python benchmarks/report_images.py runs/temperatures`. Needs Chromium."""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
#: stem of the file: width of the window, colour scheme, where the picture begins (a share of the page), its height in pixels
PICTURES = {"report-390-light": (390, "light", 0, 2000), "report-1280-dark": (1280, "dark", 0.30, 1800)}
MOST_BYTES = 150_000


def main(run: Path) -> None:
    """Write docs/images/*.webp, each of at most MOST_BYTES."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import browser, installed

    if (command := installed()) is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    folder = ROOT / "docs" / "images"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, browser(command, Path(profile)) as running:
        for stem, (width, scheme, start, height) in PICTURES.items():
            whole = Image.open(io.BytesIO(running.see(run / "report.html", width, scheme).png)).convert("RGB")
            top = int(start * whole.height)
            picture = whole.crop((0, top, whole.width, min(top + height, whole.height)))
            for quality in (85, 70, 55, 40, 25):
                content = io.BytesIO()
                picture.save(content, "webp", quality=quality)
                if content.tell() <= MOST_BYTES:
                    break
            (folder / f"{stem}.webp").write_bytes(content.getvalue())
            print(f"docs/images/{stem}.webp: {content.tell():,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
