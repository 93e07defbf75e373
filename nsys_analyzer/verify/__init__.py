"""Measures two programs in turns, and keeps what was predicted and measured."""
