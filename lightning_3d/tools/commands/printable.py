"""Text from files, made safe for a terminal."""


def printable(text: str) -> str:
    """`text` with control characters (escape sequences, right-to-left marks) as their numbers."""
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text
    )
