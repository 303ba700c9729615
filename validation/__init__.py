"""Measures reuse against cold prefill: is it faster, and are the answers still right?"""
