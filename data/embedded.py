"""The corpus that every Python installation carries: library sources, documentation, and questions on docstrings.

Knows the standard library's layout. Does not know splits or tokenizers; the file each document comes from is its group.
"""

import ast
import hashlib
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Tests, vendored packages, and pure tables teach a draft nothing about the way people write.
SKIPPED_FOLDERS = frozenset(
    (
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idle_test",
        "lib2to3",
        "__pycache__",
        "pydoc_data",
        "encodings",
    )
)
MAX_FILE_BYTES = 400_000
ANSWER_CHARACTERS = (40, 1500)
TABLE_SHARE = 0.6
QUESTIONS = (
    "What does {name} in {module} do?",
    "Explain {name} from the {module} module.",
    "How do I use {name} ({module})?",
    "Describe {kind} {name} of {module}.",
    "Can you tell me what {module}'s {name} is for?",
    "I found {name} in {module}. What is it?",
)

Chat = list[dict[str, str | None]]


class Embedded(NamedTuple):
    """A document of the embedded corpus; `group` is its file, relative to the standard library."""

    name: str
    domain: str
    group: str
    text: str | None = None
    messages: Chat | None = None


def embedded_documents(domains: tuple[str, ...], stdlib: Path | None = None) -> Iterator[Embedded]:
    """Documents of the given domains (code, prose, chat), sorted by file, the same on every machine with one Python."""
    root = Path(stdlib or sysconfig.get_path("stdlib"))
    answers: set[str] = set()
    for group, source in _sources(root):
        if "code" in domains:
            yield Embedded(f"code:{group}", "code", group, source)
        if "prose" not in domains and "chat" not in domains:
            continue
        tree = _parse(source)
        if tree is None:
            continue
        if "prose" in domains and (text := ast.get_docstring(tree)):
            yield Embedded(f"prose:{group}", "prose", group, text)
        if "chat" in domains:
            yield from _conversations(group, tree, answers)
    if "prose" in domains:
        from pydoc_data.topics import topics

        for topic in sorted(topics):
            yield Embedded(f"prose:topic/{topic}", "prose", f"pydoc_data/topics/{topic}", topics[topic].strip())


def _sources(root: Path) -> Iterator[tuple[str, str]]:
    """(path relative to the library, text) of every source file worth reading."""
    found: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        # A folder left out is not even walked: site-packages may hold more files than the library.
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        found += [(path.relative_to(root).as_posix(), path) for path in paths]
    for relative, path in sorted(found):
        # Files that the build generates for one machine would move the corpus from machine to machine.
        if path.name.startswith(("_sysconfigdata", "sitecustomize")) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few old modules are Latin-1: not worth a guess
        if text.strip() and not _is_table(text):
            yield relative, text


def _is_table(text: str) -> bool:
    """True where most lines are entries of a literal, as in generated keyword or entity tables."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    entries = sum(line[0] in "'\"0123456789(b" and line.endswith((",", "'", '"', "),")) for line in lines)
    return len(lines) > 200 and entries > TABLE_SHARE * len(lines)


def _parse(source: str) -> ast.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a library file's own invalid escapes are no concern of the user
        try:
            return ast.parse(source)
        except SyntaxError:
            return None


def _conversations(group: str, tree: ast.Module, answers: set[str]) -> Iterator[Embedded]:
    """One question and answer for each documented public definition; an answer seen before is not asked for again."""
    module = group.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for kind, name, docstring in _documented(tree, ""):
        answer = _bounded(inspect.cleandoc(docstring))
        if answer is None or answer in answers:
            continue
        answers.add(answer)
        pick = hashlib.sha256(f"{group}:{name}".encode()).digest()[0] % len(QUESTIONS)
        question = QUESTIONS[pick].format(kind=kind, name=name, module=module)
        messages: Chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield Embedded(f"chat:{group}#{name}", "chat", group, messages=messages)


def _documented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str, str]]:
    """(kind, dotted name, docstring) of the public functions, classes and methods below `node`."""
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or child.name.startswith("_"):
            continue
        kind = "class" if isinstance(child, ast.ClassDef) else "method" if prefix else "function"
        if docstring := ast.get_docstring(child, clean=False):
            yield kind, prefix + child.name, docstring
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, f"{prefix}{child.name}.")


def _bounded(answer: str) -> str | None:
    """The answer cut at a paragraph to the allowed length, or None when it says too little."""
    shortest, longest = ANSWER_CHARACTERS
    if len(answer) > longest:
        cut = answer.rfind("\n\n", 0, longest)
        answer = answer[: cut if cut > 0 else longest].rstrip()
    return answer if len(answer) >= shortest else None
