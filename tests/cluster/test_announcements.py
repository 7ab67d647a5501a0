"""What a node says of itself on the local network, and what it makes of what others say there."""

from __future__ import annotations

import pytest

from hcsim.cluster.discovery import Announcement, place_of
from hcsim.runtime.host import Service

RECORD = "10.0.0.9|[fd00::9]:52415"


@pytest.mark.parametrize("name", ["mini", "Anna's Mac mini", "mini.example.org", "ü" * 100, "a\nb\x7f", "x" * 1000])
def test_a_node_s_name_becomes_one_label_of_dns_that_ends_with_its_id(name: str) -> None:
    service = Announcement("0123456789abcdef", name, "", 1, RECORD).service()
    assert len(service.name.encode()) <= 63
    assert service.name.endswith("-01234567")
    assert service.name.isprintable()
    assert "." not in service.name
    assert service.properties["at"] == RECORD


@pytest.mark.parametrize("said", ["10.0.0.7:1", "10.0.0.7|[fd00::7]:52415", "mini.local:1", "[fe80::1%en0]:1"])
def test_a_node_is_where_it_says(said: str) -> None:
    assert place_of(Service("mini", RECORD, {"at": said})) == said


@pytest.mark.parametrize(
    "said", ["", ":", "mini", "mini:", "mini:99999", "|:1", "a b:1", "\x1b[2J:1", "a\n:1", "[fd00::7:1", "a,b:1", "ü:1"]
)
def test_where_it_says_nothing_of_use_its_record_counts(said: str) -> None:
    assert place_of(Service("mini", RECORD, {"at": said})) == RECORD
