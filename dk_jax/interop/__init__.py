"""Weights and tokenizers of published models, in and out."""
