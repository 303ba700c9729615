"""Measures how far answers are from cold ones, what planted donors change in them, and what is found again."""
