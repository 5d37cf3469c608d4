"""An audit: plain decoding by mlx-lm against speculative decoding, on the machine it runs on."""

from .audit import audit
from .records import Check, Difference, Report

__all__ = ["Check", "Difference", "Report", "audit"]
