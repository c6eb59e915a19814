"""Pages with generated parts between markers."""

import pytest

from mgk._core.markdown import fill_marked_parts, page_of_markers

PAGE = "By hand\n<!-- made: rules -->\nold\n<!-- end -->\n<!-- made: plan -->\nold plan\n<!-- end -->\n"


def test_marked_parts_are_replaced():
    assert fill_marked_parts(PAGE, {"rules": "new", "plan": r"new \1"}) == (
        "By hand\n<!-- made: rules -->\nnew\n<!-- end -->\n<!-- made: plan -->\nnew \\1\n<!-- end -->\n"
    )
    assert fill_marked_parts(PAGE, {"plan": "new"}, keep_others=True) == PAGE.replace("old plan", "new")


def test_wrong_markers_are_errors():
    with pytest.raises(ValueError, match="page has a marker for 'rules'; known markers are plan"):
        fill_marked_parts(PAGE, {"plan": "new"})
    with pytest.raises(ValueError, match="page has no markers: add <!-- made: other --> and <!-- end -->"):
        fill_marked_parts(PAGE, {"other": "new"}, keep_others=True)
    with pytest.raises(ValueError, match="page has no markers"):
        fill_marked_parts("By hand\n", {"plan": "new"})


def test_page_of_markers_can_be_filled():
    page = page_of_markers("Title", ["plan"])
    assert fill_marked_parts(page, {"plan": "text"}) == "# Title\n\n<!-- made: plan -->\ntext\n<!-- end -->\n"
