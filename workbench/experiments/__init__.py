"""Experiments: sweeps of searches over memory splits, where their results live, and what they say.

Nothing is imported here: `load_runs` must not load torch.
"""
