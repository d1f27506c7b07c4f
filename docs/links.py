#!/usr/bin/env python3
"""usage: links.py FOLDER   every link, image and script of a built site leads to a file in it, every #anchor exists."""
import html.parser
import pathlib
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.ids.add(value)
            elif name in ("href", "src", "data") and value:
                self.links.append(value)


root = pathlib.Path(sys.argv[1]).resolve()
pages = {p: Page(p) for p in sorted(root.glob("**/*.html")) if "mathjax" not in p.relative_to(root).parts}
bad = 0
for path, page in pages.items():
    for link in page.links:
        url = urllib.parse.urlsplit(link)
        if url.scheme or link.startswith("//"):
            if url.scheme not in ("http", "https", "mailto", "javascript"):
                bad, _ = bad + 1, print(f"{path.name}: odd link {link}")
            continue
        to = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
        if not to.is_file() or not to.is_relative_to(root):
            bad, _ = bad + 1, print(f"{path.name}: no file for {link}")
        elif url.fragment and to in pages and urllib.parse.unquote(url.fragment) not in pages[to].ids:
            bad, _ = bad + 1, print(f"{path.name}: no anchor for {link}")
if not pages:
    sys.exit(f"links.py: no pages in {root}")
print(f"{len(pages)} pages, {bad} broken links")
sys.exit(bad > 0)
