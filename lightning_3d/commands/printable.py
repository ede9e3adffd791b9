"""Text from files as a terminal may show it."""


def printable(text: str) -> str:
    """`text` with control characters (escape sequences, text that runs backwards) as their numbers."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )
