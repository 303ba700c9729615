"""Donor events between the workers of a fleet, and the placement of requests by them."""
