"""Whole ways in a page each, to copy from; the tests run them."""
