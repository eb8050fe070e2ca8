"""Benchmarks: how fast, how good, how sameness holds; one module a question, one record a run.

Nothing is imported here. Each module's `run` yields rows as they are measured; `record` writes
them.
"""
