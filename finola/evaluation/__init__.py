"""Scores, linear codes to compare with, counts of parameters and multiply-adds, speed."""
