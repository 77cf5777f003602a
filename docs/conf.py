"""Settings of the documentation site: `hatch run docs` builds it, and fails on any warning.

The source folder is the root of the repository, so that links between pages, notebooks and the changelog work here and
where the files are read as they are.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import graphpatch_notebook
from graphpatch_notebook import experiments

project = "graphpatch-notebook"
author = "graphpatch-notebook contributors"
version = release = graphpatch_notebook.__version__

root_doc = "docs/index"
include_patterns = ["docs/**", "examples/*.ipynb", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "node_modules", "js", "tests", "graphpatch_notebook"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the notebooks are committed with their outputs; a test runs them again. The gallery is run.
nb_execution_timeout = 600  # of a cell: the first one imports torch, beside what else a machine does
nb_ipywidgets_js = {"saved_page.js": {"type": "module"}}  # shows the views, without a network
autodoc_default_options = {"members": True}
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
napoleon_use_ivar = True
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"{project} {version}"
html_sourcelink_suffix = ""
html_static_path = ["_static", "../graphpatch_notebook/static/saved_page.js"]
html_css_files = ["wide.css"]
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}
html_show_copyright = html_show_sphinx = False

# A name in backticks in a docstring is a link, and a public name that does not exist is an error. Other code in
# backticks stays what it is.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:(?!obj).*", ".*"),  # types in signatures: most are of torch and Python
    ("py:obj", r"(?!pg\.|PatchableGraph\.|[A-Z][a-z]+[A-Z]\w*(\W|$))[^`]*"),  # does not look like a public name
    ("py:obj", r"(pg|PatchableGraph)\.(graph|model|generate)\b.*"),  # goes on in the user's model
    ("py:obj", r"(DataArray|DataLoader|GraphModule|ModelOutput)\b.*"),  # of other libraries
]
MODULES = [graphpatch_notebook, experiments]
_logger = logging.getLogger(__name__)


def resolve_public_name(app: Sphinx, env: BuildEnvironment, node: nodes.Element, text: Any) -> nodes.Node | None:
    """Links `ZeroPatch`, `pg.patch(...)` and `ExtractionOptions.decompose` (a field) from any docstring."""
    name = re.sub(r"^pg\.", "PatchableGraph.", node["reftarget"].partition("(")[0])
    owner, _, field = name.rpartition(".")
    objects = env.domains.python_domain.objects
    for module in MODULES:
        target = f"{module.__name__}.{name}"
        if target not in objects and documents_field(getattr(module, owner, None), field):
            target = f"{module.__name__}.{owner}"
        if target in objects:
            entry = objects[target]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, target)
    return None


def documents_field(owner: Any, name: str) -> bool:
    """Whether the docstring of a class, or of a base of it, has an entry for this field."""
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return any(re.search(rf"^\s*{name}(?: \(.*\))?:", base.__doc__ or "", re.MULTILINE) for base in bases)


def check_docstring(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Warns of public names without a docstring or an example, and of members that their class does not document."""
    docstring = "\n".join(lines)
    needs_example = what in ("class", "function") or ".PatchableGraph." in name
    if not docstring:
        _logger.warning("%s: no docstring", name)
    elif needs_example and ">>>" not in docstring and not name.endswith("PatchableGraph.forward"):
        _logger.warning("%s: no example", name)
    if what == "property":
        lines[:0] = ["..", ""]  # an empty comment: before a colon in the first line, napoleon sees a type
    members = {**inspect.get_annotations(value), **vars(value)} if isinstance(value, type) else {}
    for inner, member in members.items():
        is_function = inner in vars(value) and (isinstance(member, (property, classmethod)) or callable(member))
        is_documented = (is_function and inspect.getdoc(member)) or documents_field(value, inner)
        if not inner.startswith("_") and not is_documented:
            _logger.warning("%s.%s: no docstring", name, inner)


def check_all_names_are_documented(app: Sphinx, env: BuildEnvironment) -> None:
    for name in (f"{module.__name__}.{name}" for module in MODULES for name in module.__all__):
        if name not in env.domains.python_domain.objects:
            _logger.warning("%s: not in the reference", name)


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Puts llms.txt into the root of the site: a list of all pages, with links to their sources, in Markdown."""
    if error is not None:
        return
    lines = [f"# {project}", "", "> Patch and record any value of a PyTorch model. Read *For coding agents* first.", ""]

    def add(page: str) -> None:
        source = Path(app.env.doc2path(page)).relative_to(app.srcdir).as_posix()
        lines.append(f"- [{app.env.titles[page].astext()}](_sources/{source})")
        for inner in app.env.toctree_includes.get(page, ()):
            add(inner)

    add(app.config.root_doc)
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]), "utf8")


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", resolve_public_name)
    app.connect("autodoc-process-docstring", check_docstring, priority=400)  # before napoleon rewrites it
    app.connect("env-check-consistency", check_all_names_are_documented)
    app.connect("build-finished", write_llms_txt)
