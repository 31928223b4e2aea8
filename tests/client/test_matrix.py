"""The two matrices of the wire contract (16.6 cancellation, 16.7 failures), row by row: the tests that stand for each.

Each row has a test against the real server, or through a relay to it, and one against a server that misbehaves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.client import test_cancel as real
from tests.client import test_cancel_elsewhere as elsewhere
from tests.client import test_failures as failures
from tests.client import test_streams as streams

Tests = tuple[Callable[..., Any], ...]

CANCELLATION: dict[str, tuple[Tests, Tests]] = {
    "a read that is no stream": (
        (real.test_a_status_is_left, real.test_before_the_headers_with_the_start_admitted),
        (
            elsewhere.test_a_read_that_is_never_answered_is_left,
            elsewhere.test_an_answer_confirms_no_more_than_its_evidence,
        ),
    ),
    "a mutation that is no stream": (
        (real.test_a_cancel_of_a_cancel_is_unconfirmed, real.test_before_the_headers_with_the_start_admitted),
        (elsewhere.test_a_start_that_broke_off_is_still_asked_about,),
    ),
    "events, before their headers": (
        (real.test_events_are_left_before_their_headers,),
        (elsewhere.test_a_read_that_is_never_answered_is_left,),
    ),
    "an operation, before its headers": (
        (
            real.test_before_the_headers_with_the_start_admitted,
            real.test_before_the_headers_with_the_start_still_on_its_way,
            real.test_before_the_headers_of_a_start_that_is_refused,
            real.test_a_job_that_completed_first_is_completed,
            real.test_a_job_that_failed_first_is_failed_with_its_details,
        ),
        (elsewhere.test_a_start_that_broke_off_is_still_asked_about,),
    ),
    "events, during the stream": (
        (real.test_events_are_left_during_the_stream,),
        (elsewhere.test_events_that_never_end_are_left,),
    ),
    "replay, train, test, during the stream": (
        (real.test_during_the_stream_the_work_is_gone_before_the_result,),
        (elsewhere.test_an_answer_confirms_no_more_than_its_evidence,),
    ),
    "run, batch_run, during the stream": (
        (
            real.test_during_the_stream_the_work_is_gone_before_the_result,
            real.test_a_result_inside_the_grace_wins,
            real.test_a_queued_job_never_started,
            real.test_a_stop_that_the_server_cannot_prove_is_not_confirmed,
            real.test_a_server_that_is_gone_confirms_nothing,
            real.test_a_supervisor_that_was_killed_and_restarted_says_what_became_of_the_job,
        ),
        (
            elsewhere.test_an_answer_confirms_no_more_than_its_evidence,
            elsewhere.test_passing_trouble_is_tried_again,
            elsewhere.test_a_failed_record_is_asked_for_its_last_event,
            elsewhere.test_a_terminal_event_decides_while_the_cancel_waits,
            elsewhere.test_a_spoiled_stream_does_not_end_a_cancel,
        ),
    ),
    "a cancel from elsewhere in the program": (
        (
            real.test_everybody_who_cancels_gets_the_same_result,
            real.test_a_job_that_another_cancels_says_so_in_its_stream,
            real.test_a_wait_that_is_cut_short_can_be_followed_by_a_cancel,
            real.test_a_cancel_with_an_impossible_reason_is_refused_and_nothing_stops,
            real.test_leaving_stops_nothing,
            real.test_an_invocation_is_used_in_a_block,
        ),
        (elsewhere.test_passing_trouble_is_tried_again,),
    ),
    "a stream that is invalid after admission": (
        (real.test_a_spoiled_stream_stops_the_work_for_certain,),
        (
            streams.test_a_fault_stops_the_work_and_is_what_is_reported,
            streams.test_a_fault_whose_work_cannot_be_stopped,
        ),
    ),
    "an explicit cancel": (
        (real.test_operations_about_another_job_have_their_results,),
        (elsewhere.test_an_explicit_cancel_is_an_action_with_a_result_of_its_own,),
    ),
}
STATUS = failures.test_what_a_status_means
FAILURES: dict[str, tuple[Tests, Tests]] = {
    "401, 403": ((failures.test_the_real_server_refuses_by_class,), (STATUS,)),
    "429, 500 and up": (
        (real.test_a_stop_that_the_server_cannot_prove_is_not_confirmed,),
        (STATUS, failures.test_a_full_queue_leaves_no_doubt_though_its_status_would),
    ),
    "any other status": ((failures.test_the_real_server_refuses_by_class,), (STATUS,)),
    "transport": (
        (failures.test_a_server_without_tls_leaves_no_doubt, real.test_a_server_that_is_gone_confirms_nothing),
        (
            failures.test_a_connection_that_was_never_made_leaves_no_doubt,
            failures.test_an_answer_shorter_than_it_says_is_a_broken_connection,
            failures.test_one_request_is_bounded_in_time,
        ),
    ),
    "an invalid stream or JSON": (
        (real.test_a_spoiled_stream_stops_the_work_for_certain,),
        (failures.test_what_an_answer_that_cannot_be_read_means, failures.test_a_page_of_a_proxy_is_no_stream),
    ),
    "too large": (
        (),  # the real server says what it leaves out: test_client.test_an_output_too_large_for_a_stream_is_read
        (
            failures.test_what_an_answer_that_cannot_be_read_means,
            streams.test_a_fault_of_a_read_is_retryable_unless_it_is_size,
        ),
    ),
    "a cancel that is not confirmed": (
        (real.test_a_stop_that_the_server_cannot_prove_is_not_confirmed,),
        (elsewhere.test_an_answer_confirms_no_more_than_its_evidence,),
    ),
    "a credential that can be none": ((), (failures.test_a_token_without_white_space,)),  # nothing is sent
    "configuration or input": ((), (failures.test_what_no_server_would_take_is_not_sent,)),  # nothing is sent
}  # fmt: skip
#: Rows that no real server can have a part in.
NO_SERVER = {"too large", "a credential that can be none", "configuration or input"}


@pytest.mark.parametrize(("row", "tests"), [*CANCELLATION.items(), *FAILURES.items()])
def test_a_row_is_tested_on_a_real_server_and_on_one_that_misbehaves(row: str, tests: tuple[Tests, Tests]) -> None:
    honest, misbehaving = tests
    assert misbehaving
    assert bool(honest) is (row not in NO_SERVER)


@pytest.mark.parametrize("module", [real, elsewhere])
def test_every_test_of_a_cancellation_stands_for_a_row(module: ModuleType) -> None:
    named = {test for both in CANCELLATION.values() for tests in both for test in tests}
    written = {value for name, value in vars(module).items() if name.startswith("test_")}
    assert written - named == set()
