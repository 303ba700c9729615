"""The Prometheus series of the component, which Dynamo shows at DYN_SYSTEM_PORT."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from semblend_trt.metrics import counter as series

# What became of requests; `continued`: by another worker, after the first broke off.
RESULTS = ("answered", "continued", "unanswered")
# What was wrong with an instance, once for each request that it was a candidate for, or answered.
PROBLEMS = ("no_connector", "other_tokenizer", "same_worker_id")


def counter(registry: CollectorRegistry, name: str, label: str, values: tuple[str, ...]) -> Callable[[str], None]:
    """Return what counts one of `values`."""
    made = series(registry, f"semblend_dynamo_{name}", f"The component's {name}, by {label}.", label, known=values)
    return lambda value: made.labels(value).inc()
