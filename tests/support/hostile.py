"""Lists text that would act on a page or a terminal if it were not escaped."""

from __future__ import annotations

from hypothesis import strategies as st

#: What starts or ends something in markdown or HTML, turns or breaks text, controls a terminal, or is no character.
PIECES = (
    *("`", "```", "*", "**", "_", "__", "~~", "~~~", "$", "\\", "|", "\\|", "!", "#", "# ", "- ", "+ ", "1. ", "> "),
    *("---", "===", "    ", "[a](b)", "![a](b)", "[a]: b", "](", "[", "<script>", "<!--", "<details>", "</details>"),
    *("</summary>", "<http://a.b>", "&amp;", "&#10;", "&", "<", ">", ":", "|--|", "a", "x7", " ", "\xa0", "\u3000"),
    *("\n", "\n\n", "\r", "\t", "\v", "\0", "\a", "\b", "\x1b[31m", "\x1b]0;t\a", "\x7f", "\x85", "\x9b31m", "\u2028"),
    *("\u202e", "\u2066", "\ud800", "\udc80", "\udfff", "\ufdd0", "\ufeff", "\u0301"),
)
#: Pieces one after another, and letters of any script between them.
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=8).map("".join)
#: All of them in one.
WORST = "".join(f"{piece}w" for piece in PIECES)


def controls(text: str) -> set[str]:
    """The characters of a text that no terminal may be given: C0 but the newline, DEL, C1, and bidi controls."""
    return {one for one in text if _is_control(ord(one))}


def _is_control(number: int) -> bool:
    c0_or_c1 = number < 0x20 or 0x7F <= number < 0xA0
    return (c0_or_c1 and number != 0x0A) or 0x202A <= number <= 0x202E or 0x2066 <= number <= 0x2069
