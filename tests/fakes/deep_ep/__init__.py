"""A fake of DeepEP 2.1.0 on the CPU, for ranks that are threads: what adapters use of it, with its documented semantics.

What the real one asserts on host or device is asserted here; what it leaves unwritten holds NaN; what is asynchronous is
poisoned until it has been waited for.
"""

from deep_ep.elastic import ElasticBuffer, EPHandle
from deep_ep.legacy import Buffer, Config, EventHandle, EventOverlap, topk_idx_t

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t"]
