"""Prometheus metrics: our own names, and those that stock SGLang and vLLM dashboards read.

The frontend keeps one set of plain numbers; names are put on them when a page is scraped. What only the
scheduler knows comes with one `stats` call a scrape, so scraping costs its thread next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from runtime.messages import Usage
from runtime.serve.metric_names import COUNTERS, GAUGES, HISTOGRAMS, Label

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0)


class Histogram:
    """Counts by upper bound. `add` is a bisection and three additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by bound, the last one `+Inf`."""
        names = [*(str(bound) for bound in self._bounds), "+Inf"]
        running, out = 0, []
        for name, count in zip(names, self._counts, strict=True):
            running += count
            out.append((name, float(running)))
        return out


class Metrics:
    """The frontend's numbers. Used by one event loop."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name.replace("{", "(").replace("}", ")")  # simple parsers split at braces
        self.ttft = Histogram(_SECONDS)
        self.itl = Histogram(_GAPS)
        self.e2e = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.prefill = Histogram(_SECONDS)
        self.decode = Histogram(_SECONDS)
        self.totals: Counter[str] = Counter()
        self.by_reason: Counter[str] = Counter()
        self.by_status: Counter[str] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._stats: Mapping[str, Any] = {}
        self._registry.register(self)

    def finished(self, reason: str, usage: Usage, seconds: float) -> None:
        """One answer that ended, however it did. `seconds`: since the request arrived."""
        self.e2e.add(seconds)
        self.queue.add(usage.queue_s)
        self.prefill.add(max(0.0, usage.first_token_s - usage.queue_s))
        self.decode.add(max(0.0, usage.total_s - usage.first_token_s))
        self.by_reason[reason] += 1
        self.totals["requests"] += 1
        self.totals["prompt"] += usage.prompt_tokens
        self.totals["generated"] += usage.completion_tokens
        self.totals["cached"] += usage.prompt_cached
        self.totals["computed"] += usage.prompt_tokens - usage.prompt_cached
        self.totals["forced"] += usage.forced_tokens
        self.totals["retractions"] += usage.retractions

    def aborted(self) -> None:
        """A request whose client left."""
        self.totals["aborted"] += 1

    def failed(self, status: int) -> None:
        """A request answered with an error."""
        self.by_status[str(status)] += 1

    def render(self, stats: Mapping[str, Any]) -> bytes:
        """The page, with the scheduler's latest numbers (flat: name -> number)."""
        self._stats = stats
        return generate_latest(self._registry)

    # -- collection --------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_counters()
        yield from self._collect_histograms()
        yield from self._collect_scheduler()

    def _collect_counters(self) -> Iterator[Metric]:
        for row in COUNTERS:
            labels = {**self._common(row.name), **dict(row.labels)}
            family = CounterMetricFamily(row.name, row.help, labels=list(labels))
            family.add_metric(list(labels.values()), self.totals[row.key])
            yield family
        yield self._labelled("ramet_request_errors", "Requests answered with an error.", "status", self.by_status)
        for name in ("ramet_request_success", "vllm:request_success"):
            yield self._labelled(name, "Answers that ended.", "finished_reason", self.by_reason)
        yield self._realtime()

    def _realtime(self) -> Metric:
        modes = {"prefill_compute": "computed", "prefill_cache": "cached", "decode": "generated"}
        counts = Counter({mode: self.totals[key] for mode, key in modes.items()})
        return self._labelled("sglang:realtime_tokens", "Tokens by how they came about.", "mode", counts)

    def _labelled(self, name: str, text: str, label: str, counts: Counter[str]) -> Metric:
        common = self._common(name)
        family = CounterMetricFamily(name, text, labels=[*common, label])
        for value, count in sorted(counts.items()):
            family.add_metric([*common.values(), value], count)
        return family

    def _collect_histograms(self) -> Iterator[Metric]:
        for row in HISTOGRAMS:
            labels = self._common(row.name)
            histogram: Histogram = getattr(self, row.key)
            family = HistogramMetricFamily(row.name, row.help, labels=list(labels))
            family.add_metric(list(labels.values()), histogram.buckets(), histogram.total)
            yield family

    def _collect_scheduler(self) -> Iterator[Metric]:
        for row in GAUGES:
            value = self._stats.get(row.key)
            if isinstance(value, int | float):
                yield self._number(row.name, row.help, value)
        for key, value in sorted(self._stats.items()):
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield self._number(f"ramet_scheduler_{key}", "The scheduler's own number.", value)

    def _number(self, name: str, text: str, value: float) -> Metric:
        """A counter if it is called a total, else a gauge. The page puts the `_total` on a counter's name itself."""
        labels = self._common(name)
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family

    def _common(self, name: str) -> dict[str, str]:
        labels: Label = {"model_name": self._model}
        if name.startswith("sglang:"):
            labels |= {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        return labels
