"""Donor events between the workers of a fleet, and the router that places requests by them."""
