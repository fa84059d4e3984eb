"""Page: a report as one HTML file that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from specdec.evals.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 2rem 0; }
img { max-width: 100%; height: auto; background: white; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 2rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .5rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8884; text-align: left; }
td.n { text-align: right; }
"""


def html_page(title: str, text: str, tables: Sequence[Table], pictures: Mapping[str, bytes]) -> str:
    """A whole page. text: what the terminal shows, of which the lines before the tables are kept.

    pictures: PNG files by name.
    """
    return "\n".join(_parts(title, text, tables, pictures))


def _parts(
    title: str, text: str, tables: Sequence[Table], pictures: Mapping[str, bytes]
) -> Iterator[str]:
    name = escape(title)
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{name}</title><style>{_STYLE}</style></head><body>"
    yield f"<h1>{name}</h1>"
    for line in text.split("\n\n")[0].splitlines()[1:]:
        yield f"<p>{escape(line)}</p>"
    for picture, png in pictures.items():
        label = escape(picture.replace("-", " "))
        data = b64encode(png).decode()
        yield f'<figure><img alt="{label}" src="data:image/png;base64,{data}">'
        yield f"<figcaption>{label}</figcaption></figure>"
    for table in tables:
        yield f'<div class="wide">{table.html()}</div>'
    yield "</body></html>"
