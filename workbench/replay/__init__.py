"""Recorded searches run again under a simulated clock: what if the memory were another?"""
