"""The checklist that advisories of other servers, and attacks on this one, have left.

Each test here is one of its lines. It holds if the tests that it names exist and are not skipped
anywhere; those show what the line says, where what it speaks of is tested. Line 9 of `make
accept-security` runs exactly them. The numbers are advisories.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Skipped where tests do not run as root, as they do in CI.
NEED_ROOT = {"system/test_ports.py::test_another_user_opens_nothing"}


@cache
def skippable(file: str) -> dict[str, bool]:
    """Whether each test of a file may be skipped."""
    tree = ast.parse((TESTS / file).read_text(), file)
    marks = [
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if "pytest.mark.skip" in ast.unparse(node.value)
    ]
    skipping = ("pytest.mark.skip", "pytest.skip", "importorskip", *(f"@{mark}" for mark in marks))
    return {
        node.name: "pytestmark" in marks or any(word in ast.unparse(node) for word in skipping)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def shown_by(*tests: str) -> None:
    """Each is "file::test", the file under tests/."""
    for test in tests:
        file, _, name = test.partition("::")
        assert name in skippable(file), f"the line is shown by nothing any more: {test}"
        assert not skippable(file)[name] or test in NEED_ROOT, f"{test} may be skipped"


def named() -> list[str]:
    """All tests that lines name."""
    tree = ast.parse(Path(__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    lines = [call for call in calls if ast.unparse(call.func) == "shown_by"]
    words = [word.value for call in lines for word in call.args if isinstance(word, ast.Constant)]
    return sorted(set(map(str, words)))


@pytest.mark.parametrize(
    "test",
    [
        "test_checklist.py::test_that_is_not_there",
        "kernels/test_native_targets.py::test_on_an_older_machine",
    ],
)
def test_the_check_refuses(test: str) -> None:
    with pytest.raises(AssertionError):
        shown_by(test)


def test_no_pickle_torch_load_eval_yaml_load_or_marshal_in_the_tree() -> None:
    """CVE-2025-32444, CVE-2025-47277, CVE-2026-3059, CVE-2026-3060, CVE-2026-26220."""
    shown_by("test_safety.py::test_no_data_is_run_as_code", "test_safety.py::test_the_check_finds")


def test_every_decoder_of_network_bytes_is_bounded_and_fuzzed() -> None:
    shown_by(
        "fuzz/test_fuzz.py::test_hostile_input_ends_in_order",
        "engine/handoff/test_frames.py::test_oversized_records_are_refused_by_their_prefix",
        "services/host/test_host_server.py::test_bytes_that_are_no_message_are_refused",
    )


def test_servers_bind_to_the_given_address() -> None:
    """CVE-2025-30202."""
    shown_by(
        "services/host/test_host_server.py::test_binds_to_the_given_address_only",
        "test_safety.py::test_everything_binds_to_loopback_unless_told",
        "test_safety.py::test_no_address_of_all_interfaces_in_the_program",
    )


def test_every_internal_hop_shows_a_certificate_or_a_secret() -> None:
    shown_by(
        "services/host/test_access.py::test_a_stranger_is_refused_by_tls",
        "services/host/test_access.py::test_a_role_may_call_its_methods_and_no_other",
        "services/host/test_access.py::test_every_method_of_the_cluster_has_a_row",
        "services/host/test_host_server.py::test_secret",
        "system/test_rights.py::test_the_ports_of_the_cluster_speak_tls_alone",
        "system/test_roles.py::test_a_role_gets_what_the_table_says",
        "system/test_roles.py::test_a_certificate_of_another_authority_is_refused_by_tls",
    )


def test_an_unauthenticated_peer_gets_nothing_and_costs_little() -> None:
    shown_by(
        "services/host/test_host_server.py::test_denied_before_the_peer_has_sent_anything",
        "services/decode/test_decode_service.py::test_a_stranger_reaches_nothing",
        "services/test_handoff_faults.py::test_strangers_are_few_cost_no_window_and_keep_nobody_out",
        "services/host/test_metrics_http.py::test_a_crowd_keeps_nobody_out",
        "system/test_ports.py::test_nothing_listens_that_is_in_no_table",
        "system/test_ports.py::test_without_a_ticket_nothing_is_granted",
        "system/test_ports.py::test_another_user_opens_nothing",
    )


def test_every_route_but_probes_needs_a_key_when_keys_are_set() -> None:
    """CVE-2025-59425: keys are compared as hashes, in constant time."""
    shown_by(
        "gateway/http/test_errors.py::test_keys_are_needed_everywhere_but_for_probes",
        "system/test_rights.py::test_a_route_wants_what_the_table_says",
        "system/test_rights.py::test_what_is_not_in_the_table_is_not_there",
        "services/host/test_keys.py::test_a_file_has_keys_or_their_hashes",
        "services/host/test_keys.py::test_a_key_is_compared_with_all_hashes_in_constant_time",
    )


def test_models_are_data_and_no_code_of_theirs_is_fetched() -> None:
    """CVE-2026-22807, CVE-2025-32434."""
    shown_by(
        "engine/checkpoints/test_resolve.py::test_id_fetches_weights_and_data_but_no_code",
        "engine/checkpoints/test_resolve.py::test_only_data_is_ever_asked_for",
    )


def test_chat_templates_have_caps_of_time_and_memory_off_the_event_loop() -> None:
    """CVE-2026-5760, CVE-2025-62426."""
    shown_by(
        "gateway/text/test_sandbox.py::test_python_is_out_of_reach",
        "gateway/test_text_processes.py::test_a_hostile_template_is_stopped",
        "gateway/test_text_processes.py::test_the_timer_of_a_template_ends_it",
        "gateway/test_text_processes.py::test_a_template_that_needs_all_memory_is_refused",
        "gateway/test_text_processes.py::test_more_tokens_than_any_prompt_has_stay_there",
        "gateway/text/test_sandbox.py::test_nothing_is_computed_when_a_template_is_compiled",
    )


def test_clients_bring_no_template_and_no_template_kwargs() -> None:
    """CVE-2026-5760, CVE-2025-62426: the fields are refused."""
    shown_by("gateway/http/test_errors.py::test_what_is_not_supported_is_refused")


def test_regex_grammar_and_json_schema_are_refused() -> None:
    """CVE-2025-48942, -43, -44: nothing compiles them, so none can be hostile."""
    shown_by("gateway/http/test_errors.py::test_what_is_not_supported_is_refused")


def test_memory_is_linear_in_the_length_of_special_tokens() -> None:
    shown_by(
        "gateway/text/test_tokenizer.py::test_memory_is_linear_in_the_length_of_special_tokens"
    )


def test_peers_come_from_the_fleet_only() -> None:
    """CVE-2025-6242: no client names an address that is connected to."""
    shown_by(
        "test_safety.py::test_no_client_can_name_an_address",
        "services/host/test_access.py::test_a_role_may_call_its_methods_and_no_other",
        "system/test_roles.py::test_a_worker_joins_as_what_its_certificate_says",
    )


def test_gguf_and_safetensors_readers_check_every_count_length_and_offset() -> None:
    """CVE-2025-53630, CVE-2026-27940, CVE-2026-7482."""
    shown_by(
        "engine/checkpoints/test_gguf_reader.py::test_refuses",
        "engine/checkpoints/test_gguf_reader.py::test_refuses_every_truncation",
        "engine/checkpoints/test_directory.py::test_refuses_header",
        "fuzz/test_fuzz.py::test_hostile_input_ends_in_order",
    )


def test_no_url_is_fetched_on_behalf_of_a_client() -> None:
    """CVE-2025-6242, CVE-2026-24779."""
    shown_by("test_safety.py::test_nothing_that_serves_can_fetch_a_url")


def test_every_number_of_a_request_is_bounded_on_its_resolved_value() -> None:
    """CVE-2026-34756, CVE-2026-9540."""
    shown_by(
        "gateway/test_api_bounds.py::test_rest_refuses_what_is_just_outside",
        "gateway/test_api_bounds.py::test_grpc_refuses_the_same",
        "gateway/test_api_bounds.py::test_lists_have_a_length",
    )


def test_heads_and_bodies_have_limits_and_slow_clients_time_out() -> None:
    """CVE-2025-48956."""
    shown_by(
        "gateway/http/test_connections.py::test_a_head_that_is_too_large",
        "gateway/http/test_connections.py::test_too_many_headers",
        "gateway/http/test_connections.py::test_a_head_that_comes_too_slowly",
        "gateway/http/test_bounds.py::test_body_too_large",
        "gateway/http/test_bounds.py::test_body_too_slow",
        "gateway/http/test_errors.py::test_malformed_json",
    )


def test_errors_show_nothing_of_the_inside() -> None:
    """CVE-2026-22778."""
    shown_by("gateway/http/test_errors.py::test_a_fault_of_ours_is_not_shown")


def test_prefix_cache_keys_carry_a_salt_and_a_hash_without_collisions() -> None:
    """CVE-2025-46570, CVE-2025-25183."""
    shown_by(
        "engine/kv/test_block_hash.py::test_identity_and_salt_separate_caches",
        "services/host/test_keys.py::test_each_key_has_a_salt_of_its_own",
        "system/test_rights.py::test_what_a_key_has_cached_is_not_there_for_another",
    )


def test_template_and_tokenizer_run_under_limits_of_the_kernel() -> None:
    shown_by(
        "gateway/test_text_processes.py::test_a_worker_that_dies_is_replaced",
        "gateway/test_text_processes.py::test_one_that_is_late_is_left_alone",
        "gateway/test_text_processes.py::test_its_process_dies",
    )


def test_panics_of_native_libraries_are_answered_like_errors() -> None:
    shown_by(
        "gateway/test_text_processes.py::test_what_cannot_be_loaded",
        "gateway/test_service.py::test_a_broken_blob_is_the_servers_fault",
        "gateway/test_service.py::test_a_panic_while_a_prompt_is_prepared_is_one_error",
        "services/worker/test_worker_process.py::test_a_panic_while_loading_is_one_line",
    )


def test_listeners_outlive_emfile_and_econnaborted() -> None:
    shown_by(
        "engine/transport/test_listener.py::test_it_accepts_again_when_a_descriptor_is_free",
        "engine/transport/test_listener.py::test_a_client_that_has_gone_again_ends_nothing",
    )


def test_silent_peers_and_strangers_are_capped_for_each_address() -> None:
    shown_by(
        "services/test_handoff_faults.py::test_a_crowd_of_one_address_costs_others_nothing",
        "engine/transport/test_conformance.py::test_garbage_and_silence_cost_nothing",
        "system/test_ports.py::test_an_introduction_proves_nothing",
    )


def test_all_bodies_together_are_bounded() -> None:
    shown_by("gateway/http/test_bounds.py::test_bodies_together_have_a_bound_and_each_key_a_share")


def test_no_secret_stands_in_a_command_line_and_two_are_valid_at_once() -> None:
    shown_by(
        "system/test_rights.py::test_no_secret_stands_in_a_command_line",
        "services/host/test_access.py::test_a_secret_can_be_replaced",
        "services/host/test_access.py::test_files_are_read_again",
    )


def test_secrets_never_cross_an_unprotected_hop() -> None:
    """`--encrypt-kv` is refused without certificates, and `--cluster-secret` stays on a machine."""
    shown_by(
        "services/cli/test_main.py::test_mistakes_are_named",
        "services/host/test_access.py::test_a_secret_stays_on_this_machine",
        "system/test_rights.py::test_the_ports_of_the_cluster_speak_tls_alone",
    )


def test_content_type_host_and_origin_are_checked() -> None:
    shown_by(
        "gateway/http/test_origins.py::test_who_may_call",
        "gateway/http/test_origins.py::test_cors_is_closed_by_default",
        "gateway/http/test_errors.py::test_a_body_says_that_it_is_json",
    )


def test_what_a_request_says_is_cut_before_it_is_quoted() -> None:
    shown_by(
        "gateway/http/test_errors.py::test_a_long_model_name_is_cut",
        "gateway/http/test_errors.py::test_a_name_of_a_field_is_cut",
        "gateway/test_grpc_text.py::test_a_long_model_name_is_cut",
        "gateway/test_text_processes.py::test_what_a_template_raises_is_cut",
    )


def test_a_full_disk_never_stops_the_main_job() -> None:
    shown_by("engine/handoff/test_ring.py::test_a_disk_without_room_is_told")


def test_a_child_that_dies_while_loading_is_started_again() -> None:
    shown_by("services/cli/test_supervisor.py::test_one_that_is_killed_before_it_was_ready")


def test_keys_that_flood_a_route_leave_others_alone() -> None:
    shown_by(
        "gateway/test_text_processes.py::test_owners_take_turns",
        "services/host/test_fairness.py::test_one_that_takes_all_leaves_others_their_share",
        "gateway/test_rate_limits.py::test_requests_of_a_key_are_limited",
    )
