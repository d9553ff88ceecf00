"""The names on the metrics page are frozen, and the dashboard uses no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from runtime.serve.metrics import Metrics

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana.json"
STATS = "running waiting pool_usage used_tokens pool_tokens hit_rate gen_throughput evicted_tokens retractions"
FROZEN = """
ramet_requests_total ramet_aborted_total ramet_prompt_tokens_total ramet_generation_tokens_total
ramet_prefix_hit_tokens_total ramet_jump_forward_tokens_total ramet_retractions_total
ramet_time_to_first_token_seconds_bucket ramet_inter_token_latency_seconds_bucket
ramet_e2e_request_latency_seconds_bucket ramet_queue_time_seconds_bucket sglang:e2e_request_latency_seconds_bucket
sglang:e2e_request_latency_seconds_sum sglang:e2e_request_latency_seconds_count
sglang:time_to_first_token_seconds_bucket sglang:time_to_first_token_seconds_sum
sglang:time_to_first_token_seconds_count sglang:num_running_reqs sglang:num_queue_reqs sglang:gen_throughput
sglang:cache_hit_rate sglang:token_usage sglang:num_used_tokens sglang:max_total_num_tokens
sglang:prompt_tokens_total sglang:generation_tokens_total sglang:cached_tokens_total sglang:num_requests_total
sglang:num_aborted_requests_total sglang:inter_token_latency_seconds_bucket sglang:queue_time_seconds_bucket
sglang:evicted_tokens_total sglang:realtime_tokens_total sglang:num_retracted_reqs vllm:num_requests_running
vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_decode_time_seconds_bucket vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:num_preemptions_total
"""


def page() -> str:
    metrics = Metrics("a{b}c")
    metrics.by_reason["stop"] += 1
    metrics.failed(400)
    return metrics.render(dict.fromkeys(STATS.split(), 0.5)).decode()


def names(text: str) -> set[str]:
    return {line.partition("{")[0] for line in text.splitlines() if line and line[0] != "#"}


def test_no_name_is_ever_lost():
    assert set(FROZEN.split()) <= names(page())


def test_label_values_hold_no_braces_and_buckets_end_at_infinity():
    text = page()
    assert 'model_name="a(b)c"' in text
    assert 'le="+Inf"' in text
    assert all(line.count("{") <= 1 for line in text.splitlines())


def test_the_dashboard_reads_names_that_exist():
    used = set(re.findall(r"\bramet_\w+", GRAFANA.read_text())) - {"ramet_requests_total"}
    assert json.loads(GRAFANA.read_text())["title"] == "Ramet"
    assert used <= names(page())
