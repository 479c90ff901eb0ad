"""Trainings that say how good the method is: a grid of runs, resumed and skipped by itself, and the page made of it."""
