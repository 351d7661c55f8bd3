"""Measuring a cascade against plain decoding and against what transformers offers, question by question."""
