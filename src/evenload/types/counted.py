"""`counted`: a number and what it counts, as a sentence has them: `1 step`, `2,048 documents`, `3 batches`."""


def counted(number: int, noun: str) -> str:
    """The noun in the singular after 1 and in the plural after every other number, which has commas from 1,000 on.

    Args:
        noun: in the singular; of more words the last one changes.
    """
    if number == 1:
        return f"1 {noun}"
    if noun.endswith(("s", "sh", "ch", "x")):
        return f"{number:,} {noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}s"
