"""Check the wording of docstrings, comments, messages and Markdown pages against a word list."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("mgk", "experiments", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/*.md",
        "mgk/**/*.md",
        "experiments/**/*.md",
        "mgk/**/*.yaml",
        "experiments/**/*.yaml",
    )
    for path in ROOT.glob(pattern)
)

# Wording that CONTRIBUTING.md rules out: people and personified code, and turns that have a plain equivalent.
BLOCKED = re.compile(
    r"""\b(
    nobody | somebody | someone | anybody | whoever | whomever | looks?\ on | is\ told | are\ told | was\ told | told |
    heard | is\ no\ (?:run|folder|file|YAML|JSON|directory|number|tensor|model|checkpoint|language\ model|setting) |
    so\ many\ of | in\ company | by\ the\ shortest\ way |
    trainings | (?:rows?|files?|folders?)\ of\ (?:the\ )?results\b(?!/|\ files?) | nats\ a\ token |
    (?:has|had)\ no\ meaning | out\ of\ memory\ beside |
    who\ (?:asks|sets|set|has|looks|wants|leaves) |
    knows\ better | is\ wanted | are\ wanted | was\ wanted | is\ asked\ for | was\ asked\ for | asked\ for
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
# Forms in -ise of verbs that are spelled in -ize, except the public name `normalise`.
SPELLING = re.compile(
    r"""\b(?:
    (?:un|re)?(?:normalis|summaris|initialis|optimis|recognis|quantis|synchronis|materialis|serialis|maximis|minimis|
                 specialis|memoris|capitalis|parallelis|visualis|generalis|organis|factoris)(?:ed|es|ing|ers?|ations?) |
    (?:un|re)?(?:summaris|initialis|optimis|recognis|quantis|synchronis|materialis|serialis|maximis|minimis|specialis|
                 memoris|capitalis|parallelis|visualis|generalis|organis|factoris)e |
    (?<!["'`.])normalise(?!["'`:=])
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
# A relative clause or a genitive in place of the noun that the reader needs.
HEADLESS = re.compile(r"^\W*(What|Who|Whoever|Of|Where)\b(?!.*\?$)")


def texts(path: Path) -> list[tuple[int, str]]:
    """Return line numbers with the comments and string literals of a Python file."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kinds = (tokenize.COMMENT, tokenize.STRING)
    return [(token.start[0], token.string) for token in tokens if token.type in kinds]


def docstrings(path: Path) -> list[tuple[int, str]]:
    """Return line numbers and texts of all docstrings of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
    return [(getattr(node, "lineno", 1), doc) for node in nodes if (doc := ast.get_docstring(node)) is not None]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_code_avoids_blocked_words(path):
    hits = [
        f"{name(path)}:{line}: {match.group(0)!r}" for line, text in texts(path) for match in BLOCKED.finditer(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_docstrings_and_comments_open_with_a_noun_or_a_verb(path):
    comments = [(line, text) for line, text in texts(path) if text.startswith("#")]
    hits = [
        f"{name(path)}:{line}: {text[:60]!r}" for line, text in [*docstrings(path), *comments] if HEADLESS.match(text)
    ]
    assert not hits, "\n".join(hits)


def test_words_in_ize_are_spelled_alike():
    hits = []
    for path in [*SOURCES, *PAGES]:
        lines = texts(path) if path.suffix == ".py" else enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path.name != "CHANGELOG.md":
            hits += [f"{name(path)}:{line}: {match[0]!r}" for line, text in lines for match in SPELLING.finditer(text)]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("weights are normalised", True),
        ("must not normalise queries", True),
        ("Reinitialise all buffers", True),
        ("summarising the results", True),
        ("Variant(normalise=True)", False),
        ("without `normalise`, return", False),
        ("mgk.equations.normalised_posterior(query, key)", False),
        ("is initialized; precise; otherwise; raises; parallelism", False),
    ],
)
def test_spelling_pattern(text, is_found):
    assert bool(SPELLING.search(text)) == is_found


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_avoid_blocked_words(path):
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    hits = [f"{name(path)}:{number}: {match.group(0)!r}" for number, line in lines for match in BLOCKED.finditer(line)]
    assert not hits, "\n".join(hits)
