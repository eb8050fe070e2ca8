"""Test-time search: problems, strategies, PRM scoring, the rounds over two engines, answers."""
