"""Sphinx configuration. Warnings are errors (`make docs`): a name in the text that does not exist fails the build."""

import irframework

project = "irframework"
author = "the irframework authors"
copyright = f"2026, {author}"
version = release = irframework.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"irframework {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
