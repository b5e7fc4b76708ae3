"""A page of HTML, parsed."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of cells and lists."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], {}
        self.feed(text)
        assert not self.open, "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def attributes(self, tag, name):
        return [attrs[name] for found, attrs in self.tags if found == tag and name in attrs]
