"""The names on the metrics page. Dashboards depend on them: add, never rename."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Label: TypeAlias = dict[str, str]


class Row(NamedTuple):
    """One name for one number. `key`: the number's own name in Metrics, or in the scheduler's stats."""

    name: str
    key: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()


COUNTERS = (
    Row("ramet_requests", "requests", "Answers that ended."),
    Row("ramet_aborted", "aborted", "Requests whose client left or that were cancelled."),
    Row("ramet_prompt_tokens", "prompt", "Prompt tokens."),
    Row("ramet_generation_tokens", "generated", "Generated tokens."),
    Row("ramet_prefix_hit_tokens", "cached", "Prompt tokens found in the prefix cache."),
    Row("ramet_jump_forward_tokens", "forced", "Tokens that the grammar forced."),
    Row("ramet_retractions", "retractions", "Times a running request was put back."),
    Row("sglang:num_requests", "requests", "Answers that ended."),
    Row("sglang:num_aborted_requests", "aborted", "Requests whose client left."),
    Row("sglang:prompt_tokens", "prompt", "Prompt tokens."),
    Row("sglang:generation_tokens", "generated", "Generated tokens."),
    Row("sglang:cached_tokens", "cached", "Prompt tokens found in the cache.", (("cache_source", "device"),)),
    Row("vllm:prompt_tokens", "prompt", "Prompt tokens."),
    Row("vllm:generation_tokens", "generated", "Generated tokens."),
    Row("vllm:prefix_cache_queries", "prompt", "Prompt tokens looked up in the prefix cache."),
    Row("vllm:prefix_cache_hits", "cached", "Prompt tokens found in the prefix cache."),
    Row("vllm:num_preemptions", "retractions", "Times a running request was put back."),
)

HISTOGRAMS = (
    Row("ramet_time_to_first_token_seconds", "ttft", "From receipt to the first token."),
    Row("ramet_inter_token_latency_seconds", "itl", "Between two pieces of an answer."),
    Row("ramet_e2e_request_latency_seconds", "e2e", "From receipt to the end."),
    Row("ramet_queue_time_seconds", "queue", "Waiting before the first step."),
    Row("sglang:time_to_first_token_seconds", "ttft", "From receipt to the first token."),
    Row("sglang:inter_token_latency_seconds", "itl", "Between two pieces of an answer."),
    Row("sglang:e2e_request_latency_seconds", "e2e", "From receipt to the end."),
    Row("sglang:queue_time_seconds", "queue", "Waiting before the first step."),
    Row("vllm:time_to_first_token_seconds", "ttft", "From receipt to the first token."),
    Row("vllm:inter_token_latency_seconds", "itl", "Between two pieces of an answer."),
    Row("vllm:e2e_request_latency_seconds", "e2e", "From receipt to the end."),
    Row("vllm:request_queue_time_seconds", "queue", "Waiting before the first step."),
    Row("vllm:request_prefill_time_seconds", "prefill", "Prefilling the prompt."),
    Row("vllm:request_decode_time_seconds", "decode", "From the first token to the last."),
)

GAUGES = (
    Row("sglang:num_running_reqs", "running", "Requests that run."),
    Row("sglang:num_queue_reqs", "waiting", "Requests that wait."),
    Row("sglang:token_usage", "pool_usage", "Share of the KV pool in use."),
    Row("sglang:num_used_tokens", "used_tokens", "Tokens of the KV pool in use."),
    Row("sglang:max_total_num_tokens", "pool_tokens", "Size of the KV pool in tokens."),
    Row("sglang:cache_hit_rate", "hit_rate", "Share of prompt tokens found in the cache."),
    Row("sglang:gen_throughput", "gen_throughput", "Generated tokens a second, lately."),
    Row("sglang:num_retracted_reqs", "retractions", "Times a running request was put back."),
    Row("sglang:evicted_tokens_total", "evicted_tokens", "Tokens evicted from the cache."),
    Row("vllm:num_requests_running", "running", "Requests that run."),
    Row("vllm:num_requests_waiting", "waiting", "Requests that wait."),
    Row("vllm:kv_cache_usage_perc", "pool_usage", "Share of the KV pool in use."),
)
