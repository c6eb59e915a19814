"""Configuration of the documentation site: `make docs` builds it into build/docs.

The source directory is the root of the repository, so that relative links between pages, results and code work both
on the site and in a clone. The tutorials are notebooks in Markdown; the build runs them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# Tutorials run in child processes.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

project = "mgk"
author = "The mgk contributors"
copyright = "the mgk contributors"
release = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
version = release

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "results/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "mgk/*/README.md",
    "experiments/*.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "data", "tests", "**/__pycache__"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# Markdown. Anchors of headings are those that code hosts compute.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]  # pages of results start below level 1

# Tutorials.
nb_execution_mode = "auto"
nb_execution_timeout = 1800  # seconds per cell; the cells train models, slowly on a busy machine
nb_execution_raise_on_error = True
nb_merge_streams = True

# API reference: docstrings of the Google convention, in which single backquotes are code.
default_role = "py:obj"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = f"mgk {release}"
html_baseurl = ""
html_copy_source = False
html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {
    "sidebar_hide_name": False,
    "navigation_with_keys": True,
    "light_css_variables": {"font-stack": "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"},
}


def list_other_pages(app: Any, page: str, source: list[str]) -> None:
    """Add the pages in docs/ that no table of contents names to the last one, so that no page is lost."""
    if page == root_doc:
        names = [path.stem for path in sorted((ROOT / "docs").glob("*.md"))]
        listed = set(source[0].split())
        source[0] = source[0].replace(
            "OTHER PAGES", "\n".join(name for name in names if name not in {*listed, "index"})
        )


def write_redirect(app: Any, error: Exception | None) -> None:
    """Make the first page open from the root of the site."""
    if error is None and app.builder.format == "html":
        link = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{link}\n", encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", list_other_pages)
    app.connect("build-finished", write_redirect)
