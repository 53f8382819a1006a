"""How a metric is put together for /metrics, and the balancer's numbers. The label `layer` counts the layers with
experts from 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from front.messages import BalanceStatus

# name, help, value of each layer. Balancedness is mean / max of the ranks' tokens; 1 is best.
_LAYERS: tuple[tuple[str, str, Callable[[BalanceStatus], list[float]]], ...] = (
    (
        "moesaic:eplb_window_balancedness",
        "Mean / max of the ranks' tokens of the last window, all its steps together.",
        lambda status: status.window_balance,
    ),
    (
        "moesaic:eplb_step_balancedness",
        "Mean / max of the ranks' tokens of a step, averaged over the last window.",
        lambda status: status.step_balance,
    ),
    (
        "moesaic:eplb_balancedness_bound",
        "The window balancedness that no placement in these slots can exceed (the planner's lower bound of the load).",
        lambda status: status.lower_bound,
    ),
)
Numbers = tuple[tuple[str, str, Callable[[BalanceStatus], float]], ...]
_GAUGES: Numbers = (
    ("moesaic:eplb_placement_age_steps", "Steps since experts last moved.", lambda status: status.age_steps),
    ("moesaic:eplb_moving", "Experts that wait to be moved.", lambda status: status.moving),
    ("moesaic:eplb_failing", "1 while the balancer fails; serving goes on.", lambda status: bool(status.last_error)),
    ("moesaic:eplb_recording", "1 while loads are recorded.", lambda status: bool(status.recording)),
    ("moesaic:eplb_leader", "The rank that leads the balancing; the counters are its own.", lambda status: status.rank),
)
_COUNTERS: Numbers = (
    ("moesaic:eplb_steps", "Steps observed.", lambda status: status.steps),
    ("moesaic:eplb_reweights", "Times that replicas got new shares.", lambda status: status.reweights),
    ("moesaic:eplb_moves", "Experts brought to a slot.", lambda status: status.moves),
    ("moesaic:eplb_moved_bytes", "Bytes of weights moved for them.", lambda status: status.bytes_moved),
    ("moesaic:eplb_failures", "Failures of the balancer.", lambda status: status.failures),
)

Samples = Iterable[tuple[Sequence[str], float]]  # the labels' values, and the number


def gauge(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _family(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, labels: Sequence[str], samples: Samples) -> Metric:
    return _family(CounterMetricFamily(name, text, labels=labels), samples)


def _family(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, number in samples:
        family.add_metric(values, number)
    return family


def balance_families(status: BalanceStatus, model_name: str) -> Iterator[Metric]:
    for name, text, values in _LAYERS:
        layers = enumerate(values(status))
        yield gauge(name, text, ["model_name", "layer"], (((model_name, str(at)), value) for at, value in layers))
    for make, numbers in ((gauge, _GAUGES), (counter, _COUNTERS)):
        for name, text, number in numbers:
            yield make(name, text, ["model_name"], [([model_name], number(status))])
