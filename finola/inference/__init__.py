"""Photographs in, reconstructions or classes out."""
