"""XML to a tree: what is read, and that no text costs more than its length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoplan.errors import TopologyError
from topoplan.reading.nccl.topology_elements import (
    DEEPEST,
    LARGEST_TEXT,
    LONGEST_VALUE,
    MOST_ATTRIBUTES,
    MOST_ELEMENTS,
    XmlElement,
    parse_xml,
)

BOMB = '<!DOCTYPE lolz [<!ENTITY a "lol"><!ENTITY b "&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;">]><system>&c;</system>'
EXTERNAL = '<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<system version="&x;"/>'


def test_elements_attributes_and_lines_are_read() -> None:
    """Comments, declarations, byte order marks and white space leave no trace."""
    start = "\ufeff\n<?xml version='1.0' encoding='utf-16'?>\n<!-- a -->"
    text = f"{start}<a b='1' c=\"&lt;\">\n <d/><!-- - -->\n <e></e>\n</a>\n"
    assert parse_xml(text) == XmlElement(
        "a", {"b": "1", "c": "<"}, (XmlElement("d", line=4), XmlElement("e", line=5)), 3
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "line 1: document type declarations and entities are refused"),
        (EXTERNAL, "line 1: document type declarations and entities are refused"),
        ('\n<a>\n<b c="&x;"/></a>', "line 3: the XML text is not well-formed (undefined entity)"),
        ("<a>\n<b>\n", "line 3: the XML text ends too early, inside <b>; give the whole file"),
        ("<a>\n<b c='1", "line 2: the XML text ends too early, inside <a>; give the whole file"),
        ("<a>\n<b></a>", "line 2: the XML text is not well-formed (mismatched tag), inside <b>"),
        ("<a/><a/>", "line 1: the XML text is not well-formed (junk after document element)"),
        ("<a>\nhello</a>", "line 2: text 'hello' between elements"),
        ("<a b='1' b='2'/>", "line 1: the XML text is not well-formed (duplicate attribute)"),
        ("<a" * 3, "line 1: the XML text is not well-formed"),
        ("", "line 1: the XML text ends too early; give the whole file"),
        ("<a b='&#10;'/>", "line 1: a 'b' is longer than 4096 characters or cannot be printed"),
        (f"<a b='{'x' * LONGEST_VALUE}'/>", "line 1: a 'b' is longer than 4096 characters"),
        (f"<a{'b' * LONGEST_VALUE}/>", "line 1: the name of an element is too long"),
        ("\n<a>" * (DEEPEST + 1), f"line {DEEPEST + 2}: elements are nested more than {DEEPEST} deep"),
        ("<a>" + "<b/>" * MOST_ELEMENTS, f"line 1: more than {MOST_ELEMENTS} elements"),
        (
            "<a " + " ".join(f"b{i}=''" for i in range(MOST_ATTRIBUTES + 1)) + "/>",
            f"line 1: an element has more than {MOST_ATTRIBUTES} attributes",
        ),
        ("<a>" + " " * LARGEST_TEXT + "</a>", f"the XML text has {LARGEST_TEXT + 7} bytes"),
    ],
)
def test_what_is_no_plain_xml_is_refused_in_one_line(text: str, says: str) -> None:
    """Entity bombs and external entities, truncated and endless texts: the line says where."""
    with pytest.raises(TopologyError) as caught:
        parse_xml(text)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>/='\"!-[]&;ab \n?\x00\ud800ü"), max_size=60))
def test_any_text_is_a_tree_or_one_line(text: str) -> None:
    """Nothing else comes out, whatever goes in."""
    try:
        root = parse_xml(text)
    except TopologyError as error:
        lines = str(error).count("\n")
    else:
        lines = 0
        assert 1 <= root.line <= 1 + text.count("\n")
        assert f"<{root.name}" in text
    assert lines == 0
