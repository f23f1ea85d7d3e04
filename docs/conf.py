"""Sphinx builds the documentation: ``python -m sphinx -W --keep-going docs docs/_build``."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import lightning_gpipe

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "lightning-gpipe"
copyright = "the lightning-gpipe developers"
version = release = lightning_gpipe.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "drawings"]
exclude_patterns = ["_build", "benchmarks/intro.md"]

myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"lightning-gpipe {version}"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False

#: Pages that have others below them in the sidebar, in the order in which their text links to them.
_BELOW = ("recipes/README", "decisions/README")


def _complete_contents(app: Sphinx, name: str, source: list[str]) -> None:
    if name in _BELOW:
        pages = "\n".join(re.findall(r"\]\(([\w-]+)\.md\)", source[0]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _complete_contents)
