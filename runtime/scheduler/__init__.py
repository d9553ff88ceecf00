"""The scheduler: continuous batching over a radix prefix cache."""

from runtime.scheduler.loop import Scheduler

__all__ = ["Scheduler"]
