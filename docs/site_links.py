"""A hook of mkdocs: names files of the repository that the site does not contain, in place of a dead link."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn `[text](../path)` into the text and the path."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", r"\1 (`\2` in the repository)", markdown)
