"""README, CONTRIBUTING and docs/ stay true where a test can tell: links lead somewhere, examples of configs load."""

import re
from pathlib import Path

import pytest
import yaml

from draftsmith.config import Config, load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")
EXAMPLE = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)


def dead_links(page: Path) -> list[str]:
    """Relative links that lead to no file."""
    links = LINK.findall(page.read_text(encoding="utf-8"))
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def examples(page: Path) -> list[str]:
    """Fenced YAML whose every key is one of a config's sections."""
    found = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    return [text for text in found if set(yaml.safe_load(text)) <= set(Config.model_fields)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page):
    assert dead_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_a_config_is_a_valid_one(page, tmp_path):
    for number, text in enumerate(examples(page)):
        file = tmp_path / f"example{number}.yaml"
        file.write_text(text, encoding="utf-8")
        assert load_config(file).config.name == file.stem


def test_there_are_links_and_examples_and_faults_in_them_would_be_seen(tmp_path):
    assert sum(len(examples(page)) for page in PAGES) >= 10
    assert sum(len(LINK.findall(page.read_text(encoding="utf-8"))) for page in PAGES) >= 20
    page = tmp_path / "page.md"
    page.write_text("[a](missing.md) [b](page.md#part) [c](https://example.org)\n```yaml\nseed: 0\n```\n")
    assert dead_links(page) == ["missing.md"]
    assert examples(page) == ["seed: 0\n"]


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in readme] == []
