"""A strict reader of the page: refuses what is not well formed, and hands out its tables as text."""

from html.parser import HTMLParser

VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """Tags must be balanced; `ids`, `attributes` (tag, name, value), `tables` (id or None, section, rows of text)."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.attributes, self.tables, self.text = [], [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            self.attributes.append((tag, name, value))
            if name == "id":
                self.ids.append(value)
        around = (dict(a).get("id") for t, a in reversed(self.open) if t in ("details", "section"))
        section = next(filter(None, around), None)
        if tag == "table":
            title = self.text.get("figcaption", "")
            self.tables.append({"id": dict(attributes).get("id"), "section": section, "title": title, "rows": []})
        if tag == "tr":
            self.tables[-1]["rows"].append([])
        if tag in ("td", "th"):
            self.tables[-1]["rows"][-1].append("")
        self.text[tag] = ""
        if tag not in VOID:
            self.open.append((tag, attributes))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        opened, _ = self.open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"

    def handle_data(self, data):
        for tag, _ in self.open:
            self.text[tag] = self.text.get(tag, "") + data
        if any(tag in ("td", "th") for tag, _ in self.open):
            note = " " if self.open[-1][0] == "b" else ""
            self.tables[-1]["rows"][-1][-1] += note + data
