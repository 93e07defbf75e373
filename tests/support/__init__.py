"""Builders of tiny inputs, fakes and references that the tests share."""
