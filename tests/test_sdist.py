"""The source distribution holds what the tests and the Makefile read."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "docs", "examples", "experiments", "mgk", "results", "tests")
FILES = ("pyproject.toml", "MANIFEST.in", "Makefile", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*.lock", "*-analysis", "*.egg-info")


@pytest.mark.slow
def test_source_distribution_is_complete(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=IGNORED)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    expected = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as contents:
        packed = {name.partition("/")[2] for name in contents.getnames()}
    assert expected - packed == set()
