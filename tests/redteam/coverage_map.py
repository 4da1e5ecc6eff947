"""Which tests execute which known attack or fault: data, held against the suites by test_coverage_map.py.

Attacks are numbered as in the list of ways in which kernels have cheated their judges: A 1 to 9, B 10 to 18,
C 19 to 33, D 34 to 40, E 41 to 53. Faults that other judges were reported for are G1 to G21.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one attack or fault is executed.

    Attributes:
      what: the attack or fault in a few words.
      cpu: names of cases of tests/redteam/suite.py and honest.py.
      gpu: names of cases of tests/gpu/redteam/attacks.py and attacks_audit.py. Of the CPU's, ported.py sends those in Python too.
      tests: further tests, FILE::FUNCTION from the repository's root.
      reason: why nothing of it can run on a CPU; "" where something does.
    """

    what: str
    cpu: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    reason: str = ""


def _on(what: str, cpu: str = "", *, gpu: str = "", tests: str = "", reason: str = "") -> Entry:
    """An entry from names separated by blanks."""
    return Entry(
        what=what,
        cpu=tuple(cpu.split()),
        gpu=tuple(gpu.split()),
        tests=tuple(f"tests/{test}" for test in tests.split()),
        reason=reason,
    )


ATTACKS = {
    1: _on(
        "work on a side stream",
        gpu="side_stream",
        tests="gpu/test_sandbox_device.py::test_work_on_a_side_stream_is_paid_for_back_to_back_and_seen_by_the_profile",
        reason="a CPU has no streams; work that ends later on other threads is number 3",
    ),
    2: _on(
        "a stream made inside the extension, its API's name pasted together",
        gpu="stream_made_in_the_extension",
        reason="a CPU has no streams; sources are not filtered by name on either device",
    ),
    3: _on(
        "a thread finishes the work after the clock",
        "python_thread_finishes_later python_thread_joined_when_asked native_thread_finishes_later fresh_calls_deferred",
        gpu="audited_block_done_later",
    ),
    4: _on(
        "a lazy result",
        "lazy_tensor_subclass lazy_result_materialised_when_sent lazy_negation output_requires_grad",
    ),
    5: _on(
        "a patched timer",
        "patched_perf_counter replaced_code_of_the_timer libc_clock_interposed claims_without_work "
        "span_of_infinity interpreter_claimed traced_harness",
        gpu="patched_events a_fifth_of_every_span a_fifth_of_every_long_span ordinary_spans_shortened_by_what_is_forgiven "
        "ordinary_spans_shortened_to_what_memory_gives spans_of_a_tiny_kernel_shortened",
    ),
    6: _on(
        "a copy or callback that completes after the end event",
        gpu="copy_finished_later",
        reason="a CPU has no asynchronous copies; what a thread finishes later is number 3",
    ),
    7: _on(
        "an empty or partial CUDA graph",
        gpu="empty_graph",
        reason="a CPU has no graphs; calls that do nothing are number 14",
    ),
    8: _on("the program prints its own time or verdict", "prints_a_verdict"),
    9: _on(
        "slowing the baseline",
        "threads_burn_the_baselines_time threads_burn_between_own_blocks children_burn_the_baselines_time "
        "global_flags_for_the_baseline memory_pressure_for_the_baseline priority_and_affinity",
    ),
    10: _on(
        "output cached by identity, version or address",
        "cached_by_identity cached_by_version cached_by_data_ptr cached_by_address_and_corners cached_by_fingerprint",
        gpu="cached_by_data_ptr",
    ),
    11: _on(
        "output cached inside the extension", "static_map_by_pointer static_map_by_content", gpu="static_map_by_pointer"
    ),
    12: _on(
        "replay of the last call",
        "replay_default_argument replay_function_attribute replay_generator replay_lru_cache replay_contextvar replay_closure same_buffer_every_call",
    ),
    13: _on("replay by shape or seed", "replay_by_shape"),
    14: _on(
        "honest for the first calls only",
        "call_counting call_counting_native call_counting_every_second_call fresh_calls_left_out fresh_calls_of_nothing_at_nowhere",
        gpu="audited_block_left_out audited_outputs_nowhere",
    ),
    15: _on("the harness is detected", "harness_detected_by_stack harness_detected_by_environment"),
    16: _on(
        "half precision when timed, full when checked",
        "half_precision_when_timed fresh_calls_in_half_precision",
        gpu="audited_block_in_half_precision",
    ),
    17: _on(
        "an approximation for one distribution of inputs",
        "softmax_without_its_maximum softmax_without_its_maximum_slowly inverse_by_a_short_series",
    ),
    18: _on(
        "answers computed where nobody times",
        "answers_from_guessed_seeds work_done_when_inputs_arrive inputs_descriptor_kept "
        "inputs_watched_where_they_arrive replays_and_hides_work_in_the_audit",
        gpu="replays_and_hides_in_the_arena",
    ),
    19: _on("stale memory", "stale_memory stale_memory_native stale_memory_after_the_check"),
    20: _on(
        "inputs overwritten in place",
        "inputs_zeroed parameters_zeroed nothing_changed_or_aliased",
    ),
    21: _on("random numbers patched or drawn again", "random_numbers_patched inputs_regenerated"),
    22: _on(
        "global flags that change the reference's numerics",
        "reference_numerics_by_flags flush_to_zero rounding_mode",
    ),
    23: _on(
        "an input or a view of one returned",
        "input_returned view_of_the_input_returned input_resized_to_hold_the_output",
    ),
    24: _on("zeros or a constant", "zeros_for_tiny_outputs constant_for_tiny_outputs"),
    25: _on(
        "a structure that compares equal",
        "empty_tensor empty_list nested_list sparse_output malformed_tensors nan_with_a_payload infinite_output",
    ),
    26: _on(
        "wrong type, broadcastable shape",
        "wrong_dtype double_dtype broadcastable_shape scalar_output one_row_expanded complex_output",
    ),
    27: _on("a patched comparator", "patched_comparators"),
    28: _on("the expected value from the caller's frames", "expected_value_from_the_stack"),
    29: _on("the expected value from the collector", "expected_value_from_the_collector"),
    30: _on(
        "the expected value from device memory",
        "expected_value_from_the_heap",
        gpu="scans_gpu_memory",
    ),
    31: _on(
        "less precision than promised",
        "float16_for_float32 bfloat16_for_float32 float8_for_float32 float16_for_tiny_outputs tf32_for_float32",
        gpu="tf32_for_float32",
    ),
    32: _on(
        "part of the work within tolerance",
        "truncated_sum truncated_loop_native last_row_left_out mean_of_a_sample",
    ),
    33: _on("hard-coded seeds", "hard_coded_seed"),
    34: _on("a fallback to PyTorch", "falls_back_to_pytorch extension_that_fails_on_purpose"),
    35: _on(
        "a decoy",
        "kernel_never_launched decoy_on_one_element extension_never_called extension_on_one_element "
        "extension_that_returns_its_input executable_page_of_a_file library_that_was_not_built_here",
        tests="gpu/test_sandbox_triton.py::test_a_decoy_beside_the_librarys_matmul_is_no_kernel "
        "sandbox/test_cuda_coverage.py::test_a_decoy_with_a_library_kernels_name_does_not_inherit_its_time",
    ),
    36: _on(
        "a fig leaf",
        "fig_leaf extension_for_the_relu_alone extension_that_spins_beside_pytorch "
        "extension_that_takes_turns_with_pytorch",
    ),
    37: _on(
        "a library laundered through C++",
        "pytorch_called_from_the_extension numpy_behind_an_extension library_under_another_name "
        "bare_kernel_that_calls_pytorch_s_library",
        gpu="library_laundering",
    ),
    38: _on("the reference itself", "inherits_the_reference imports_the_reference"),
    39: _on(
        "compiled or traced PyTorch presented as a kernel",
        "traced_by_jit compiled_by_torch",
        gpu="graph_over_pytorch",
    ),
    40: _on("routes around a patched functional", "aten_by_its_back_door"),
    41: _on(
        "exit code 0",
        "sys_exit_0 os_exit_0 exit_0_in_c exit_0_in_a_constructor system_exit_in_a_destructor hangs_when_it_ends",
    ),
    42: _on(
        "a forged result",
        "forged_result_on_stdout garbage_on_the_channel dup2_over_the_channel "
        "forged_reply_with_the_stolen_nonce whole_runner_replaced result_file result_in_a_pipe_with_a_name "
        "huge_header bottomless_header channel_shared_with_a_child",
    ),
    43: _on(
        "tracing, memory of others, signals",
        "memory_of_the_parent ptrace_of_the_parent signals_to_everybody code_patched_through_proc_self_mem "
        "signal_handler_against_the_filter alarm_breaks_the_deadline memory_hidden_from_the_judge",
        tests="sandbox/test_confinement.py::test_the_attack_fails",
    ),
    44: _on("modules dropped for import", "modules_dropped_for_import"),
    45: _on(
        "the judge edited on disk",
        "judge_edited_on_disk library_rewritten_after_its_check",
    ),
    46: _on(
        "the harness patched",
        "harness_patched_through_sys_modules clock_replaced_through_the_c_api",
    ),
    47: _on("encoded sources, reloaded modules", "encoded_source harness_reloaded"),
    48: _on(
        "files read at build time",
        "file_read_by_the_compiler file_embedded_by_the_assembler",
        gpu="file_read_by_the_device_compiler",
        tests="sandbox/test_extension_requests.py::test_flags_that_name_files_programs_or_plugins_are_refused_by_name",
    ),
    49: _on("a pickle sent back", "pickle_sent_back"),
    50: _on("network", "network", tests="sandbox/test_confinement.py::test_the_attack_fails"),
    51: _on("sources and results of others", "files_of_others sources_of_others"),
    52: _on(
        "bombs and endless work",
        "fork_bomb memory_bomb memory_promised_and_never_touched memory_bomb_in_a_constructor disk_filler endless_output "
        "kernel_that_never_ends build_that_never_ends",
        tests="gpu/test_sandbox_faults.py::test_a_kernel_that_never_ends_is_stopped_at_its_deadline",
    ),
    53: _on("an illegal memory access", "illegal_access", gpu="illegal_access"),
}
"""By number."""

FAULTS = {
    "G1": _on("one illegal access fails every later evaluation", "illegal_access", gpu="illegal_access"),
    "G2": _on(
        "a hung kernel wedges the service",
        "kernel_that_never_ends",
        tests="gpu/test_sandbox_faults.py::test_a_kernel_that_never_ends_is_stopped_at_its_deadline",
    ),
    "G3": _on(
        "a build lock left by SIGKILL",
        tests="sandbox/test_extension_requests.py::test_a_lock_left_by_sigkill_stops_nobody",
    ),
    "G4": _on(
        "two builds in one directory",
        tests="sandbox/test_load_inline.py::test_identical_sources_of_two_workers_are_built_once "
        "sandbox/test_load_inline.py::test_several_extensions_of_one_name_live_side_by_side",
    ),
    "G5": _on(
        "one timeout deletes everybody's builds",
        tests="sandbox/test_load_inline.py::test_a_build_that_never_ends_is_ended_and_charged",
    ),
    "G6": _on(
        "temporary files fill the disk",
        "disk_filler",
        tests="sandbox/test_server.py::test_nothing_is_left_in_the_temporary_directory "
        "sandbox/test_server.py::test_a_killed_oracle_s_files_go_when_it_is_replaced",
    ),
    "G7": _on("a jitted function from a string has no source", "triton_copy triton_softmax"),
    "G8": _on(
        "a stale artifact in place of the edited kernel",
        tests="sandbox/test_build.py::test_equal_sources_are_built_once_and_others_are_not_confused "
        "sandbox/test_extension_requests.py::test_what_the_compiler_sees_changes_the_key",
    ),
    "G9": _on(
        "a deadline that runs in the queue",
        tests="redteam/test_reported_faults.py::test_waiting_in_the_queue_is_not_counted_against_a_deadline",
    ),
    "G10": _on(
        "an exception that cannot be serialised",
        tests="redteam/test_reported_faults.py::test_an_exception_that_cannot_be_told_is_reported_all_the_same",
    ),
    "G11": _on(
        "zero trials reported as a pass",
        tests="redteam/test_reported_faults.py::test_no_trial_is_no_pass "
        "sandbox/test_protocol.py::test_a_wrong_request_is_refused_with_the_field_named",
    ),
    "G12": _on(
        "only the last of several calls checked",
        "call_counting_every_second_call fresh_calls_left_out stale_memory_after_the_check",
    ),
    "G13": _on(
        "NaN in the reference",
        tests="sandbox/test_verdict.py::test_a_reference_with_nan_or_without_output_cannot_be_compared_with "
        "sandbox/test_judging.py::test_a_faulty_task_is_rejected_and_says_why",
    ),
    "G14": _on(
        "honest rounding rejected",
        "rounding_noise_around_zero judged_by_the_references_rounding other_order_of_summation",
    ),
    "G15": _on(
        "a missing profiler replaced in silence",
        tests="sandbox/test_cuda_coverage.py::test_a_profiler_that_fails_gives_no_coverage_and_its_reason",
    ),
    "G16": _on(
        "kernels left out of a sum by name",
        "triton_named_like_a_librarys",
        tests="sandbox/test_cuda_coverage.py::test_an_own_kernel_named_like_a_library_kernel_counts",
    ),
    "G17": _on(
        "orphans keep device memory",
        tests="gpu/test_sandbox_faults.py::test_no_process_keeps_device_memory_after_its_evaluation "
        "sandbox/test_judging.py::test_a_module_that_misbehaves_when_called",
    ),
    "G18": _on(
        "a fork after CUDA has started",
        tests="sandbox/test_cuda_preload.py::test_preloading_asks_no_driver_starts_no_thread_and_leaves_a_seed",
    ),
    "G19": _on(
        "more shared memory than the device has",
        tests="sandbox/test_triton_aot.py::test_a_kernel_that_needs_more_shared_memory_than_a_block_may_use_does_not_count_as_compiled",
    ),
    "G20": _on(
        "the comparison itself runs out of memory",
        tests="sandbox/test_judging.py::test_a_module_that_misbehaves_when_called",
    ),
    "G21": _on("slower earns more", tests="sandbox/test_verdict.py::test_faster_never_earns_less"),
}
"""By number in the order of the list."""

OTHER_KINDS: tuple[str, ...] = ()
"""Cases of tests/redteam that fit none of the numbers."""
