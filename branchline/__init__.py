"""Branchline: an LLM serving engine whose heart is a cache-aware scheduler."""

__version__ = "0.1.0"
