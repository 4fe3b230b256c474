"""Every bound of the system, in one struct; each field names its unit last.

Nothing in Baton waits, queues, retries or grows without a bound from here.
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds in force for one server; a configuration may change any of them."""

    # the doors
    body_bytes_max: int = 4 << 20
    header_s_max: float = 20.0
    body_s_max: float = 60.0
    idle_s_max: float = 75.0
    messages_max: int = 2048
    choices_max: int = 128
    top_logprobs_max: int = 20
    prompt_logprobs_max: int = 20
    scores_per_request_max: int = 1 << 18
    stop_strings_max: int = 16
    stop_string_chars_max: int = 256
    stop_token_ids_max: int = 128
    logit_bias_entries_max: int = 300
    allowed_ids_bytes_max: int = 20 << 10
    bad_words_max: int = 128
    bad_word_chars_max: int = 64
    bad_words_tokens_max: int = 1024
    label_chars_max: int = 256
    streams_per_connection_max: int = 256
    connections_max: int = 4096
    socket_send_bytes_max: int = 1 << 16
    client_ping_s: float = 0.4
    client_silence_s_max: float = 60.0
    client_outbox_messages_max: int = 256
    mailbox_tokens_max: int = 1024
    answer_s_max: float = 60.0
    stalled_s_max: float = 60.0
    request_s_max: float = 3600.0
    priority_max: int = 100
    tier_classes: int = 10
    lives_max: int = 8
    lone_deaths_max: int = 2
    keepalive_s: float = 5.0
    # answers that are kept: for a repeated key, for a client that comes back
    idempotency_s_max: float = 600.0
    idempotency_bytes_max: int = 64 << 20
    resume_s_max: float = 30.0
    listeners_per_answer_max: int = 16
    # the board
    requests_per_frontend_max: int = 1024
    sweep_interval_s: float = 0.1
    # the links
    frame_bytes_max: int = 16 << 20
    inbox_frames_max: int = 4096
    outbox_frames_max: int = 65536
    inbox_batch_frames_max: int = 64
    # the rings
    plan_ring_bytes: int = 16 << 20
    token_ring_bytes: int = 4 << 20
    ring_full_wait_s: float = 0.001
    # the engine
    running_requests_max: int = 256
    step_tokens_max: int = 512
    steps_in_flight_max: int = 2
    prefix_wait_s_max: float = 2.0
    output_tokens_max: int = 1 << 20
    # what is believed of the machine before it is known: a step, a token in it, a position attended to, a byte moved
    step_prior_s: float = 0.005
    token_prior_s: float = 0.0002
    context_prior_s: float = 1e-8
    swap_prior_bytes_per_s: int = 4 << 30
    # how many steps in a row a prompt may be held back for the sake of those that decode
    prefill_wait_steps_max: int = 4
    # a step with a prompt in it may always take so many times what it would take without; up to so many times where
    # more prompts wait than sequences decode, of which so many count at most
    prefill_slowdown: float = 1.35
    prefill_slowdown_max: float = 5.0
    prefill_decodes_max: int = 4
    # admission: what may wait, what stays free, how often one may be made to give way, when to come back
    queue_tokens_max: int = 1 << 21
    kv_headroom_share: float = 0.01
    kv_watermark_share: float = 0.01
    preemptions_per_request_max: int = 4
    drain_window_s: float = 30.0
    retry_after_unknown_s: int = 5
    retry_after_s_max: int = 120
    # the order of the waiting: how far it may differ from that of their coming, what a class or a token is worth
    order_delay_s_max: float = 60.0
    order_class_s: float = 10.0
    order_token_s: float = 0.02
    # what is remembered of the lengths of answers, for each tenant, model and class of sampling
    predictor_keys_max: int = 1024
    predictor_lengths_max: int = 500
    predictor_lengths_min: int = 32
    step_span_links_max: int = 128
    request_spans_max: int = 64
    # processes
    starting_s_max: float = 60.0
    loading_s_max: float = 120.0
    warming_s_max: float = 180.0  # the first start of a configuration measures its largest step
    watch_interval_s: float = 0.25
    ping_interval_s: float = 1.0
    hung_s_max: float = 10.0
    hung_steps_max: int = 20
    tell_s_max: float = 0.5
    dumps_max: int = 20
    drain_s_max: float = 30.0
    stop_s_max: float = 3.0
    restarts_max: int = 5
    restart_window_s: float = 60.0
    restart_backoff_s: float = 0.1
    # what is kept of the past
    trace_store_bytes_max: int = 8 << 20
    trace_buffer_spans_max: int = 4096
    trace_emitted_spans_max: int = 256
    trace_buffer_bytes_max: int = 64 << 10
