"""What people reported wrong in public projects of this field, and the test that shows that it is right here.

`COVERED` maps a case's number to tests, `REFUSED` to the part of it that is refused and why; the numbers that belong to
the harness (statistics, storage, report, gate) are in `ELSEWHERE`, so that none is lost.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

# Every number of the table of cases.
ALL = (1, 2, 3, 5, 6, 8, 10, 11, 12, 13, 15, 17, 20, 21, 22, 24, 25, 26, 27, 30, 32, 35, 38, 40, 42, 47, 50, 53, 54, 55,
       57, 59, 64, 66, 67, 72, 73, 74, 75, 78, 79, 80, 82, 84, 85, 93, 95, 106, 108, 112)  # fmt: skip

# Statistics, storage, report, gate, validation verdicts: their tests name their cases themselves.
ELSEWHERE = (25, 26, 27, 66, 72, 73, 74, 75, 78, 79, 80, 82, 84, 85, 106, 108, 112)

COVERED: dict[int, tuple[str, ...]] = {
    1: ("runtime_rows::test_twelve_requests_that_end_at_different_times_equal_themselves_alone",
        "runtime_rows::test_the_embedding_names_the_owner_of_every_row"),
    2: ("runtime_saves::test_what_was_read_stays_what_it_was_when_the_model_goes_on",
        "runtime_lent::test_a_kept_value_never_changes_without_a_save"),
    3: ("runtime_points::test_half_a_residual_is_never_handed_out_as_a_layers_input",
        "points_vllm::test_every_point_is_the_same_on_both_engines"),
    5: ("runtime_rows::test_left_padding_never_shows",),
    6: ("runtime_schedule::test_a_prompt_in_chunks_is_the_prompt",
        "runtime_schedule::test_only_the_pass_that_draws_has_logits"),
    8: ("runtime_schedule::test_cold_and_warm_are_the_same_and_others_keep_their_hits",
        "runtime_schedule::test_an_edit_never_reaches_another_request_through_the_cache"),
    10: ("sharded::test_fused_projections_come_back_in_the_order_of_one_rank",
         "sharded::test_zeroed_up_makes_the_mlp_exactly_zero"),
    11: ("runtime_cases::test_a_flattened_batch_is_cut_by_its_requests",),
    12: ("taps::test_hooks_that_come_after_the_first_compiled_call_are_caught",
         "runtime_cases::test_a_module_that_was_compiled_before_fires_or_says_that_it_did_not"),
    13: ("runtime_versions::test_a_runner_without_a_seam_is_refused_by_name",
         "runtime_saves::test_a_broken_model_is_an_error_and_never_a_result"),
    15: ("runtime_saves::test_a_broken_model_is_an_error_and_never_a_result",
         "points_vllm::test_a_hybrid_is_within_the_yardstick"),
    17: ("runtime_rows::test_the_same_function_again_and_again",),
    20: ("runtime_writes::test_an_edit_at_an_absolute_position_happens_once",),
    21: ("runtime_points::test_points_are_what_transformers_says", "points_hf::test_the_end_of_the_model"),
    22: ("runtime_cases::test_a_layers_output_is_the_requests_rows_whatever_it_returns",),
    24: ("points_hf::test_a_head_zeroed_is_its_columns_zeroed",
         "runtime_points::test_head_ablation_is_zeroing_the_columns_of_the_output_projection"),
    30: ("runtime_entries::test_coroutines_share_nothing",),
    32: ("runtime_entries::test_three_prompts_in_async_mode_give_three_results_in_order",),
    35: ("runtime_rows::test_left_padding_never_shows", "points_hf::test_nobody_elses_rows"),
    38: ("runtime_writes::test_a_steering_vector_is_applied_layers_times_passes",),
    40: ("points_hf::test_a_key_value_head_reaches_its_own_queries_only",
         "runtime_points::test_a_key_value_head_feeds_its_own_group_of_query_heads"),
    42: ("points_hf::test_the_stream_adds_up", "runtime_points::test_identities_of_a_block"),
    47: ("runtime_errors::test_passed_never_ran_and_unknown_are_three_errors",),
    50: ("runtime_saves::test_saves_of_all_kinds_come_back",),
    53: ("runtime_errors::test_the_users_error_arrives_with_file_and_line",
         "runtime_errors::test_errors_and_saves_travel"),
    54: ("runtime_entries::test_every_entry_point_gives_the_same_change",),
    55: ("runtime_clean::test_a_plain_engine_beside_ours_is_untouched",
         "runtime_clean::test_importing_patches_nothing_and_imports_no_engine"),
    57: ("runtime_clean::test_the_users_own_hooks_survive_and_fire",
         "runtime_lent::test_what_a_hook_of_the_users_gives_out_is_what_is_read"),
    59: ("runtime_clean::test_memory_is_flat_over_two_hundred_runs",
         "runtime_cases::test_a_hundred_requests_need_hardly_more_memory_than_their_batch"),
    64: ("runtime_schedule::test_every_position_is_saved_once_and_in_order",),
    67: ("runtime_cases::test_a_prompt_has_its_first_token_once",
         "runtime_cases::test_a_first_token_that_would_be_there_twice_is_refused"),
    93: ("runtime_saves::test_before_and_after_an_edit_in_place_are_not_the_same",
         "runtime_lent::test_saves_before_and_after_an_edit_differ_by_it"),
    95: ("runtime_errors::test_an_intervention_that_names_a_module_is_small_on_the_wire",
         "runtime_cases::test_a_sweep_sends_its_function_once"),
}  # fmt: skip

# Parts of a case that cannot be had here, and what says so.
REFUSED: dict[int, str] = {
    35: "right padding: there is none, every batch is padded on the left and a prompt is a list of its own tokens",
    42: "BLOOM: attn_out and mlp_out are refused with the reason (rt.why_not), since they contain the residual",
    54: "HTTP: the runtime starts no server, so there is no such way in; requests are made in Python",
    67: "a text that would begin with BOS twice is refused: which of the two is meant cannot be told",
}


@functools.cache
def docstrings_of(file: str) -> dict[str, str]:
    """The tests of a file and their docstrings."""
    tree = ast.parse((HERE / f"test_{file}.py").read_text())
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def named(docstring: str) -> set[int]:
    """The numbers of the cases that a docstring names: "case 5" or "cases 5 and 35".

    >>> sorted(named("cases 5 and 35: left padding")), named("in any case 5 times")
    ([5, 35], set())
    """
    found = re.match(r"cases? (\d+(?:(?:, | and )\d+)*)[:.]", docstring)
    return {int(n) for n in re.findall(r"\d+", found[1])} if found else set()


def test_no_case_is_lost() -> None:
    assert sorted((*COVERED, *ELSEWHERE)) == sorted(ALL)
    assert len(set(ALL)) == len(ALL) == 50
    assert set(REFUSED) <= set(COVERED)


@pytest.mark.parametrize("case", COVERED)
def test_its_tests_exist_and_say_so(case: int) -> None:
    for test in COVERED[case]:
        file, _, name = test.partition("::")
        assert name in docstrings_of(file), f"case {case}: there is no {test}"
        if file.startswith(("runtime_", "points_")):
            assert case in named(docstrings_of(file)[name]), f"case {case} is not in the docstring of {test}"
