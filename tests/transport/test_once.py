"""A thing is said once."""

from __future__ import annotations

from hcsim.transport.admission_queue import LogDeduplicator


def test_what_differs_in_a_port_alone_is_the_same_thing() -> None:
    said: list[str] = []
    once = LogDeduplicator(said.append)
    for text in ("10.0.0.1:4000 was refused", "10.0.0.1:4001 was refused", "10.0.0.2:4000 was refused", "b has gone"):
        once(text)
        once(text)
    assert said == ["10.0.0.1:4000 was refused", "10.0.0.2:4000 was refused", "b has gone"]


def test_a_thousand_strangers_do_not_fill_the_memory() -> None:
    said: list[str] = []
    once = LogDeduplicator(said.append)
    for number in range(1000):
        once(f"stranger {number}")
    assert len(said) == 1000
    once("stranger 999")
    assert len(said) == 1000
    once("stranger 0")
    assert said[1000:] == ["stranger 0"]  # that one is forgotten
