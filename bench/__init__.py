"""Measurements behind ``make bench``; nothing here asserts."""
