"""The tests that are gone since the commit before this change, with what replaced each."""

import re
from collections import Counter
from collections.abc import Iterable

from accept import ROOT, git

BEFORE = "bac4786"  # the last commit before the rooms
GONE = {
    "test_the_control_image_has_no_torch_and_nobody_is_root": (
        "test_no_image_has_torch_and_nobody_is_root",
    ),
    "test_decoders_raise_only_frame_error": ("test_decoders_raise_only_their_own_error",),
    # The function that it tested is gone; what remains of the rule:
    "test_first_needed_block_of_a_window": ("test_the_first_block_that_a_window_sees",),
    # Templates run in processes with limits of time and memory; the sandbox, which rewrote them and
    # counted their steps, is gone, and with it the budget that no template could name.
    "test_endless_templates_are_stopped": ("test_the_timer_of_a_template_ends_it",),
    "test_the_deadline_is_of_the_clock_given": ("test_the_timer_of_a_template_ends_it",),
    "test_huge_results_are_refused_before_they_are_made": (
        "test_a_template_that_needs_all_memory_is_refused",
    ),
    "test_preparing_is_bounded_in_time": (
        "test_a_hostile_template_is_stopped",
        "test_a_prompt_waits_for_a_worker_only_so_long",
    ),
    "test_ordinary_templates_keep_their_meaning": ("test_equals_transformers",),
    "test_templates_cannot_name_the_budget": (),
    "test_mutated_files": ("test_hostile_input_ends_in_order",),
    "test_key_files": (
        "test_a_file_has_keys_or_their_hashes",
        "test_keys_that_would_accept_everybody",
        "test_without_keys_everybody_is_accepted",
    ),
    "test_no_secret_no_server": ("test_what_cannot_be_trusted_is_refused",),
    "test_the_secret_must_be_given": ("test_the_secret_must_be_given_and_may_cross_the_network",),
    "test_metrics_over_http": ("test_metrics_and_nothing_else",),
    "test_metrics_that_are_spoken_of_exist": ("test_metrics_exist",),
    "test_content_type_is_not_needed": ("test_a_body_says_that_it_is_json",),  # the reverse holds
    "test_a_model_must_be_named_if_there_are_several": (
        "test_a_model_must_be_named",
        "test_a_prompt_to_tokenize_names_its_model_if_there_are_several",
    ),
    "test_the_next_router_takes_over": ("test_another_router_takes_over",),
    "test_a_space_is_put_before_the_first_text_only": ("test_a_space_is_put_before_every_text",),
    "test_what_the_engine_refuses_is_raised": ("test_what_is_wrong_is_said",),
    "test_each_line_is_in_order_of_arrival_whoever_leaves_or_comes_back": (
        "test_each_line_is_in_order_of_rank_whoever_leaves_or_comes_back",
    ),
    "test_strangers_are_few_and_cost_no_window": (
        "test_strangers_are_few_cost_no_window_and_keep_nobody_out",
    ),
    "test_rope_counts_and_the_context_length_does_not": (
        "test_rope_counts_and_the_context_length_only_for_rope_that_depends_on_it",
    ),
    "test_every_cell_is_hit_and_nothing_is_lost_leaked_or_changed": (
        "test_cells_are_hit_and_nothing_is_lost_leaked_or_changed",
    ),
    "test_a_lost_router_costs_nothing": ("test_without_a_router_it_is_not_ready",),
    "test_strikes_are_told_and_survive_a_router": ("test_crash_counts_survive_a_router",),
    "test_only_a_later_epoch_of_the_same_request_is_told": (
        "test_only_a_later_epoch_of_the_same_request_is_restored",
    ),
    "test_struck_twice_is_not_tried_a_third_time": ("test_after_two_crashes_it_is_given_up",),
    "test_dead_worker_that_has_not_begun_is_no_strike": (
        "test_dead_worker_that_has_not_begun_is_no_crash",
    ),
    "test_a_worker_that_dies_after_its_session_broke_counts_as_a_strike": (
        "test_a_worker_that_dies_after_its_session_broke_counts_as_a_crash",
    ),
    "test_where_it_ran_and_its_strikes_travel_with_it": (
        "test_where_it_ran_and_its_crashes_travel_with_it",
    ),
    "test_without_kin_it_ends_with_a_typed_error": (
        "test_without_a_compatible_worker_it_ends_with_a_typed_error",
    ),
    "test_moves_count_among_what_changes_its_worker": (
        "test_migrations_count_among_what_changes_its_worker",
    ),
    "test_only_the_package_imports_cli": ("test_only_the_package_imports_the_rooms_that_compose",),
    "test_idle_peer_is_not_frozen": ("test_a_peer_whose_counter_moves_is_not_frozen",),
    "test_select_gives_every_operation_or_names_the_devices": (
        "test_the_reference_has_every_operation",
    ),
    # Bindings that only tests called are gone; test_plain runs elementwise_test.cpp, which has
    # these rules for every instruction set.
    "test_rms_norm_in_place_and_by_row": ("test_plain",),
    "test_soft_cap_is_tanh_to_a_few_units": ("test_plain",),
    "test_rope": ("test_plain",),
    "test_row_by_row_changes": ("test_plain",),
    "test_a_prefill_killed_late_costs_only_the_missing_chunks": (
        "test_killing_prefill_during_a_transfer_loses_no_request",
    ),
    "test_stopping_leaves_nothing_behind": (
        "test_a_long_prompt_goes_remote_and_a_short_one_stays",
    ),
    "test_the_modules_of_the_design_exist": ("test_the_modules_in_tables_exist",),
}
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)


def missing(before: Iterable[str], now: Iterable[str]) -> dict[str, str]:
    """Tests that are gone and not named in GONE, and those in it whose successor is not there.
    A name counts as often as it is defined."""
    there = Counter(now)
    gone = Counter(before) - there
    found = {name: "gone, without a successor" for name in gone if name not in GONE}
    for name, successors in GONE.items():
        if lost := [one for one in successors if one not in there]:
            found[name] = f"gone, and so is {', '.join(lost)}"
    return found


def checked() -> dict[str, object]:
    """Of the history: raises CalledProcessError if the commit before is not in this clone."""
    before = DEFINED.findall(git("grep", "-h", "def test_", BEFORE, "--", "tests"))
    now = [n for path in (ROOT / "tests").rglob("*.py") for n in DEFINED.findall(path.read_text())]
    wrong = missing(before, now)
    return {"ok": not wrong, "before": len(before), "now": len(now), "gone": GONE, "wrong": wrong}
