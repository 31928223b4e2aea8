"""The fair queue: slots, rounds between crews, limits per crew (B26)."""

from __future__ import annotations

from supervisor.admission import FairQueue


def _drain(queue: FairQueue[str]) -> list[str]:
    granted = []
    while (item := queue.grant()) is not None:
        granted.append(item)
    return granted


def test_slots_go_round_the_crews_that_wait() -> None:
    queue: FairQueue[str] = FairQueue(slots=5)
    for item in ("a1", "a2", "a3", "a4", "b1", "c1"):
        queue.add(item[0], item)
    assert _drain(queue) == ["a1", "b1", "c1", "a2", "a3"]
    assert (queue.running, queue.waiting) == (5, 1)


def test_a_released_slot_goes_to_the_next_in_the_round() -> None:
    queue: FairQueue[str] = FairQueue(slots=1)
    for item in ("a1", "a2", "b1"):
        queue.add(item[0], item)
    order = []
    while (item := queue.grant()) is not None:
        order.append(item)
        queue.release(item[0])
    assert order == ["a1", "b1", "a2"]
    assert queue.running == 0


def test_a_crew_at_its_limit_waits_and_holds_nobody_up() -> None:
    queue: FairQueue[str] = FairQueue(slots=4, crew_limit={"a": 1, "b": None}.get)
    for item in ("a1", "a2", "b1", "b2"):
        queue.add(item[0], item)
    assert _drain(queue) == ["a1", "b1", "b2"]
    queue.release("a")
    assert _drain(queue) == ["a2"]


def test_a_withdrawn_item_is_never_granted() -> None:
    queue: FairQueue[str] = FairQueue(slots=2)
    queue.add("a", "a1")
    queue.add("a", "a2")
    assert queue.withdraw("a", "a1")
    assert not queue.withdraw("a", "a1")
    assert not queue.withdraw("nobody", "x")
    assert _drain(queue) == ["a2"]


def test_a_slot_that_is_never_released_is_out_of_service() -> None:
    queue: FairQueue[str] = FairQueue(slots=2)
    queue.occupy("stuck")
    queue.add("a", "a1")
    queue.add("a", "a2")
    assert _drain(queue) == ["a1"]


def test_the_first_in_line_of_each_crew_is_known() -> None:
    queue: FairQueue[str] = FairQueue(1)
    for crew, item in (("a", "a1"), ("b", "b1"), ("a", "a2")):
        queue.add(crew, item)
    assert queue.first_in_line() == ["a1", "b1"]
    queue.grant()
    assert queue.first_in_line() == ["b1", "a2"]
