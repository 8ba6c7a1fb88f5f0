"""Encoders, decoders and heads, and the models made of them."""
