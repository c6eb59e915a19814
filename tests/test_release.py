"""Check the files of a release: versions, changelog, messages about extras, and the workflow of the forge."""

import ast
import re
from pathlib import Path

import pytest
import yaml

import mgk

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
if not (ROOT / ".github").is_dir():
    pytest.skip("not in a clone or a complete source distribution", allow_module_level=True)


def test_versions_agree():
    (version,) = re.findall(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changelog, re.MULTILINE)
    assert mgk.__version__ == version == str(citation["version"])
    assert sections[:2] == [("Unreleased", ""), (version, str(citation["date-released"]))]


def test_messages_about_pip_name_an_extra():
    """Check that each message with `pip install` names an extra that exists, or the package itself."""
    extras = re.findall(r"^(\w+) = \[", PYPROJECT, re.MULTILINE)
    messages = []
    for path in (ROOT / "mgk").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "pip install" in node.value:
                messages.append(node.value)
    assert len(messages) >= 4
    for message in messages:
        if re.search(r"pip install (--upgrade )?$", message):
            continue  # an f-string with the name of a third-party package
        names = re.findall(r"(?:mgk|\.)\[(\w+)\]", message)
        assert set(names) <= set(extras), message
        assert names or "pip install mgk" in message, message


def test_forge_files_are_valid():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    checks = workflow["jobs"]["checks"]["strategy"]["matrix"]["target"]
    assert set(checks) <= set(targets)
    required = re.search(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)[1].split()
    assert set(required) - {"browser"} <= set(checks)
    templates = list((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(templates) == 3
    assert all(yaml.safe_load(path.read_text(encoding="utf-8"))["body"] for path in templates)
