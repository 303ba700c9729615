"""Families of cases that prove or break reuse: each one way in which text that was seen before comes back."""
