"""Trainings that evaluate the method: a grid of runs, which resumes and skips finished ones, and its page."""
