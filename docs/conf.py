"""The site of these pages: `make docs` builds it into build/docs with all it needs, so that it opens from a disk.

Pages are Markdown as they stand in the repository. The files in ``ABOVE`` are pages of the site
as well. A link to a file beside docs/ gives the file; folders and pages that are not here are named alone.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from fairfold import __version__ as release

ROOT = Path(__file__).parents[1]
ABOVE = {
    "index": "README.md",
    "changes": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
}
END_OF_DOORS = "<!-- end of the doors -->"
GLOSSARY_ROW = re.compile(r"^\| \*\*([\w -]+)\*\*(?:, \*\*([\w -]+)\*\*)?[^|]*\| ([^|]+) \|", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

project, version = "fairfold", release
project_copyright = "the authors of fairfold"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = [".md", ".rst"]
nitpicky = False

html_theme = "furo"
html_title = f"fairfold {release}"
html_show_sourcelink = html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_js_files = ["words.js", "glossary.js"]
copybutton_exclude = ".linenos, .gp, .go"
templates_path: list[str] = []
pygments_style, pygments_dark_style = "friendly", "monokai"

myst_heading_anchors = 4
suppress_warnings = ["myst.strikethrough"]
highlight_language = "none"  # blocks say what they are

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}
napoleon_google_docstring, napoleon_numpy_docstring = True, False


def read(_: Any, name: str, source: list[str]) -> None:
    """Put the page above docs/ before what a page of docs/ adds to it, and mend links to what a site does not have."""
    folder = posixpath.dirname(posixpath.join("docs", name))
    if name in ABOVE:
        text = (ROOT / ABOVE[name]).read_text(encoding="utf-8")
        text = LINK.sub(lambda found: moved(found, "", folder), text)
        doors, end, rest = source[0].rpartition(END_OF_DOORS)
        head, picture, body = text.partition("\n![") if end else (text, "", "")
        source[0] = f"{head}\n{doors}{picture}{body}\n{rest}"
        return
    source[0] = LINK.sub(lambda found: moved(found, folder, folder), source[0])


def moved(found: re.Match[str], before: str, folder: str) -> str:
    """A link of a page in the folder ``before``, as a page in ``folder`` has it."""
    mark, text, link, anchor = found.groups()
    if ":" in link:
        return found[0]
    place = posixpath.normpath(posixpath.join(before, link))
    for name, above in ABOVE.items():
        place = f"docs/{name}.md" if place == above else place
    if (ROOT / place / "README.md").exists() and place.startswith("docs/"):
        place += "/README.md"
    if (ROOT / place).is_dir() or (place.endswith(".md") and not place.startswith("docs/")):
        return f"`{place}`" if text.strip("`/") in (place, posixpath.basename(place)) else f"{text} (`{place}`)"
    return f"{mark}[{text}]({posixpath.relpath(place, folder)}{anchor or ''})"


def glossary() -> dict[str, str]:
    """The words of the glossary in concepts.md, and what they mean, without marks."""
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    rows = GLOSSARY_ROW.findall(text)
    return {
        word.lower(): re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", meaning)
        for *words, meaning in rows
        for word in words
        if word
    }


def write_glossary(app: Any, _: Any) -> None:
    """Put the glossary beside the script that shows it."""
    if app.builder.format == "html":
        place = Path(app.outdir) / "_static" / "words.js"
        place.write_text(f"const WORDS = {json.dumps(glossary(), ensure_ascii=False)};\n", encoding="utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.connect("build-finished", write_glossary)
