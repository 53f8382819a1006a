"""A fake of deep_gemm.utils."""

from . import math

__all__ = ["math"]
